// SPDX-License-Identifier: MIT
#pragma once

#include <c10/core/Device.h>
#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <cstdint>
#include <lamina/adapt/torch.hpp>
#include <lamina/layout.hpp>
#include <lamina/partition.hpp>
#include <span>
#include <vector>

namespace lab {

/// A torch model as lamina sees it: a layout, and for each layer the elements of its parameters and of its gradient in the
/// CPU's memory. With parts, the layout that the server and the workers talk about is of parts of the layers.
///
/// A copy shares the network and all tensors. On the CPU these are the tensors of the network. A network on another device is mirrored: upload() and download() carry
/// parameters there and gradients back.
class replica {
 public:
  /// Moves the network to the device. `mirrored` is for tests.
  explicit replica(torch::nn::AnyModule trained, std::size_t part_elements = 0,
                   torch::Device device = torch::kCPU, bool mirrored = false);

  torch::nn::AnyModule& network() { return network_; }
  torch::Device device() const { return device_; }
  const lamina::partition& partition() const { return partition_; }
  const lamina::layout& model() const { return partition_.parts(); }

  /// The elements of layer, or part, l of model().
  std::span<float> operator[](std::size_t l) const { return part_of(parameters_, l); }
  /// The same of its gradient, as of the last download().
  std::span<float> gradient(std::size_t l) const { return part_of(gradients_, l); }
  /// The gradients of whole layers.
  const std::vector<torch::Tensor>& gradients() const { return gradients_; }
  /// Copies them in place of those of a backward pass.
  void set_gradients(const std::vector<torch::Tensor>& gradients);

  /// The network computes with what was written to the parameters.
  void upload();
  /// The gradients are those of the last backward pass.
  void download();

  /// What the network keeps beside its parameters, the running statistics of batch normalisation: to read, and, with
  /// set_statistics(), to write.
  std::vector<torch::Tensor> statistics() const;
  void set_statistics(const std::vector<torch::Tensor>& statistics);

 private:
  std::span<float> part_of(const std::vector<torch::Tensor>& layers, std::size_t l) const;

  torch::nn::AnyModule network_;
  lamina::partition partition_;
  torch::Device device_;
  bool mirrored_;
  std::vector<torch::Tensor> parameters_;
  std::vector<torch::Tensor> gradients_;
};

/// Of all parameters, to compare replicas by; never 0.
std::uint64_t hash_of(const replica& local);

}  // namespace lab
