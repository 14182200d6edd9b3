// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "memory_ranks.hpp"

/// What sums that travel in 16 bits are to give, by arithmetic of double and apart from the library: it knows no buckets, chunks or shards.
namespace lamina_test {

/// The nearest number of the type, ties to even; beyond its range the largest.
inline float rounded_to(lamina::payload_type type, float value) {
  if (type == lamina::payload_type::as_is || value == 0 || !std::isfinite(value)) return value;
  const bool is_bfloat16 = type == lamina::payload_type::bfloat16;
  const int digits = is_bfloat16 ? 7 : 10;
  const int least_exponent = is_bfloat16 ? -126 : -14;
  const double largest = is_bfloat16 ? 0x1.fep127 : 65504;
  const double quantum = std::ldexp(1.0, std::max(std::ilogb(value), least_exponent) - digits);
  return static_cast<float>(std::clamp(std::nearbyint(value / quantum) * quantum, -largest, largest));
}

/// Of layer l over all ranks: the sum of rounded numbers in rank order, rounded itself where it goes back to all, over P.
inline std::vector<float> rounded_mean(lamina::payload_type type, const all_gradients& gradients,
                                       std::size_t l, bool goes_back = true) {
  const auto ranks = static_cast<float>(gradients.size());
  if (gradients.size() == 1) return gradients[0][l];
  std::vector<float> mean;
  for (std::size_t i = 0; i < gradients[0][l].size(); ++i) {
    volatile float sum = rounded_to(type, gradients[0][l][i]);  // no wider than a float
    for (std::size_t r = 1; r < gradients.size(); ++r) sum = sum + rounded_to(type, gradients[r][l][i]);
    mean.push_back((goes_back ? rounded_to(type, sum) : static_cast<float>(sum)) / ranks);
  }
  return mean;
}

inline std::vector<std::vector<float>> rounded_means(lamina::payload_type type,
                                                     const all_gradients& gradients,
                                                     const std::vector<bool>& is_sent) {
  std::vector<std::vector<float>> means(gradients[0].size());
  for (std::size_t l = 0; l < means.size(); ++l) {
    if (is_sent[l]) means[l] = rounded_mean(type, gradients, l);
  }
  return means;
}

}  // namespace lamina_test
