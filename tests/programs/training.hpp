// SPDX-License-Identifier: MIT
#pragma once

#include <lamina/layout.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

/// A model of three layers and gradients of whole numbers, so that sums are exact in any order.
using tensors = std::vector<std::vector<float>>;

inline lamina::layout small_model() {
  return lamina::layout({{"embedding", {400, 16}}, {"head.weight", {40, 10}}, {"head.bias", {10}}});
}

inline tensors zeros(const lamina::layout& model) {
  tensors all;
  for (const std::size_t elements : model.sizes()) all.emplace_back(elements, 0.0F);
  return all;
}

/// The gradients of one worker in one step, different in each; those of later layers are larger.
inline tensors gradients_of(const lamina::layout& model, std::size_t worker, std::uint64_t step) {
  tensors all = zeros(model);
  std::uint64_t random = 7919 * (worker + 1) + 104729 * step;
  for (std::size_t l = 0; l < all.size(); ++l) {
    for (float& each : all[l]) {
      random = random * 6364136223846793005U + 1442695040888963407U;
      each =
          static_cast<float>(static_cast<int>((random >> 33U) % 9) - 4) * static_cast<float>(1U << (3 * l));
    }
  }
  return all;
}

inline void add_to(tensors& sum, const tensors& addend) {
  for (std::size_t l = 0; l < sum.size(); ++l) {
    for (std::size_t i = 0; i < sum[l].size(); ++i) sum[l][i] += addend[l][i];
  }
}
