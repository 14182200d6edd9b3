// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/adapt/torch.hpp>
#include <lamina/layout.hpp>
#include <lamina/partition.hpp>
#include <span>
#include <utility>
#include <vector>

namespace resnet50_ps {

/// A torch model as lamina sees it: a layout, and for each layer the tensor that holds its parameters. With parts, the
/// layout that the server and the workers talk about is of parts of the layers.
struct replica {
  explicit replica(torch::nn::AnyModule trained, std::size_t part_elements = 0)
      : network(std::move(trained)),
        partition(layout_of(*network.ptr()), part_elements),
        parameters(network.ptr()->parameters()) {}

  const lamina::layout& model() const { return partition.parts(); }

  /// The elements of layer, or part, l of model(), in the tensor's own memory.
  std::span<float> operator[](std::size_t l) const {
    const auto whole = lamina::writable_elements_of<float>(parameters[partition.layer_of(l)]);
    return whole.subspan(partition.begin(l), model().sizes()[l]);
  }

  /// The elements of the gradient of layer, or part, l of model(), as the last backward pass left them.
  std::span<float> gradient(std::size_t l) const {
    const auto whole = lamina::writable_elements_of<float>(parameters[partition.layer_of(l)].grad());
    return whole.subspan(partition.begin(l), model().sizes()[l]);
  }

  /// The same of whole layers.
  std::vector<torch::Tensor> gradients() const {
    std::vector<torch::Tensor> all;
    for (const torch::Tensor& each : parameters) all.push_back(each.grad());
    return all;
  }

  torch::nn::AnyModule network;
  lamina::partition partition;
  std::vector<torch::Tensor> parameters;

 private:
  static lamina::layout layout_of(const torch::nn::Module& module) {
    std::vector<lamina::layer> layers;
    for (const auto& item : module.named_parameters()) {
      layers.push_back(lamina::layer_of(item.key(), item.value()));
    }
    return lamina::layout(std::move(layers));
  }
};

/// A copy of the parameters: for each layer, where its elements lie.
using parameter_store = std::function<std::span<float>(std::size_t layer)>;

/// Of all parameters, to compare replicas by; never 0.
std::uint64_t hash_of(const lamina::layout& model, const parameter_store& parameters);

}  // namespace resnet50_ps
