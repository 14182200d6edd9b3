// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <lamina/collectives/torch_hooks.hpp>
#include <vector>

#include "model/batch_norm.hpp"
#include "model/replica.hpp"

/// The small network of tests that hook its backward pass and gate its forward pass, and what these look at.
namespace lab {

inline constexpr std::int64_t classes = 5;
inline constexpr std::int64_t features = 128;
inline constexpr std::int64_t hidden_width = 64;
inline const lamina::collectives::gate open_gate;

/// Called in the backward pass of the first layer, when the gradients of all others are complete; may be empty.
inline std::function<void()> before_last_gradient;

/// A convolution, a normalisation, a layer larger than a part, and one with fewer elements than there are ranks.
struct network_impl : torch::nn::Module {
  template <class Impl>
  using gated = lamina::collectives::gated<Impl>;

  explicit network_impl(bool normalises = true)
      : conv(register_module(
            "conv", gated<torch::nn::Conv2dImpl>(open_gate, torch::nn::Conv2dOptions(3, 8, 3).bias(false)))),
        norm(normalises ? register_module("norm", gated<batch_norm_impl>(open_gate, 8)) : nullptr),
        hidden(register_module("hidden", gated<torch::nn::LinearImpl>(open_gate, features, hidden_width))),
        output(register_module("output", gated<torch::nn::LinearImpl>(open_gate, hidden_width, classes))),
        scale(register_module(
            "scale", gated<torch::nn::LinearImpl>(open_gate, torch::nn::LinearOptions(1, 1).bias(false)))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor first = conv(x);
    if (first.requires_grad()) {
      first.register_hook([](const torch::Tensor& gradient) {
        if (before_last_gradient) before_last_gradient();
        return gradient;
      });
    }
    const torch::Tensor seen = torch::relu(norm.is_empty() ? first : norm(first)).flatten(1);
    const torch::Tensor logits = output(torch::relu(hidden(seen)));
    return scale(logits.reshape({-1, 1})).reshape(logits.sizes());
  }
  gated<torch::nn::Conv2dImpl> conv;
  gated<batch_norm_impl> norm;
  gated<torch::nn::LinearImpl> hidden, output;
  gated<torch::nn::LinearImpl> scale;
};
TORCH_MODULE_IMPL(network, network_impl);

inline std::vector<float> parameters_of(const replica& local) {
  std::vector<float> flat;
  for (std::size_t l = 0; l < local.model().layers(); ++l)
    flat.insert(flat.end(), local[l].begin(), local[l].end());
  return flat;
}

/// A digest of the parameters, as an evaluation: of parameters that are not whole it is another.
inline std::uint64_t digest_of(const replica& local) {
  return hash_of(local) >> 1U;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace lab
