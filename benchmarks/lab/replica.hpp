// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <cstdint>
#include <lamina/adapt/torch.hpp>
#include <lamina/layout.hpp>
#include <span>
#include <utility>
#include <vector>

namespace lab {

/// A torch network as lamina sees it: a layout, and for each layer, or fragment, the elements of its parameters and of its gradient.
class replica {
 public:
  replica(torch::nn::AnyModule trained, std::size_t fragment_elements)
      : network_(std::move(trained)),
        parameters_(network_.ptr()->parameters()),
        partition_(lamina::layout_of(*network_.ptr()), fragment_elements) {}

  torch::nn::AnyModule& network() { return network_; }
  const lamina::tiling& tiling() const { return partition_; }
  const lamina::layout& model() const { return partition_.fragments(); }
  const std::vector<torch::Tensor>& parameters() const { return parameters_; }

  /// The elements of layer, or fragment, l of model().
  std::span<float> operator[](std::size_t l) const {
    return fragment_of(parameters_[partition_.layer_of(l)], l);
  }
  /// Of whole layers, as the last backward pass has left them.
  std::vector<torch::Tensor> gradients() const { return lamina::gradients_of(parameters_); }
  std::vector<std::span<float>> gradient_elements() const {
    std::vector<std::span<float>> all;
    for (const torch::Tensor& each : parameters_)
      all.push_back(lamina::writable_elements_of<float>(each.grad()));
    return all;
  }
  /// Copies them in place of those of a backward pass.
  void set_gradients(const std::vector<torch::Tensor>& gradients) {
    for (std::size_t l = 0; l < parameters_.size(); ++l) {
      if (parameters_[l].grad().defined()) {
        parameters_[l].mutable_grad().copy_(gradients[l]);
      } else {
        parameters_[l].mutable_grad() = gradients[l].clone();
      }
    }
  }

 private:
  std::span<float> fragment_of(const torch::Tensor& layer, std::size_t l) const {
    return lamina::writable_elements_of<float>(layer).subspan(partition_.begin(l), model().sizes()[l]);
  }

  torch::nn::AnyModule network_;
  std::vector<torch::Tensor> parameters_;
  lamina::tiling partition_;
};

}  // namespace lab
