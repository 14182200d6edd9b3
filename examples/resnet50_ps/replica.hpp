// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/modules/container/any.h>

#include <lamina/adapt/torch.hpp>
#include <lamina/layout.hpp>
#include <span>
#include <utility>
#include <vector>

namespace resnet50_ps {

/// A torch model as lamina sees it: a layout, and for each layer the tensor that holds its parameters.
struct replica {
  explicit replica(torch::nn::AnyModule trained)
      : network(std::move(trained)),
        model(layout_of(*network.ptr())),
        parameters(network.ptr()->parameters()) {}

  /// The elements of layer l, in the tensor's own memory.
  std::span<float> operator[](std::size_t l) const {
    return lamina::writable_elements_of<float>(parameters[l]);
  }

  torch::nn::AnyModule network;
  lamina::layout model;
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

}  // namespace resnet50_ps
