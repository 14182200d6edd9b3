// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "lamina/residual.hpp"

/// What the tests of residuals share.
namespace lamina_test {

template <class T>
inline constexpr T largest = std::numeric_limits<T>::max();
template <class T>
inline constexpr T infinity = std::numeric_limits<T>::infinity();
template <class T>
inline constexpr T nan_value = std::numeric_limits<T>::quiet_NaN();

template <class T>
std::vector<T> copy_of(std::span<const T> values) {
  return {values.begin(), values.end()};
}

inline lamina::worker_options with_check(lamina::non_finite check, double momentum = 0) {
  return {.momentum = momentum, .non_finite = check};
}

/// What a refusal may leave, over the mean magnitude of the block of 4,096 elements.
template <class T>
inline constexpr double left_by_a_refusal = 2048 * std::numeric_limits<T>::epsilon();

/// The largest distance of an element from what it was before a refusal, over what that may leave.
template <class T>
double worst_distance(std::span<const T> now, std::span<const T> before) {
  constexpr std::size_t block = 4096;
  double worst = 0;
  for (std::size_t begin = 0; begin < now.size(); begin += block) {
    const std::size_t end = std::min(begin + block, now.size());
    double total = 0;
    for (std::size_t i = begin; i < end; ++i) total += std::abs(static_cast<double>(before[i]));
    const double most = total / static_cast<double>(end - begin) * left_by_a_refusal<T>;
    for (std::size_t i = begin; i < end; ++i) {
      const double distance = std::abs(static_cast<double>(now[i]) - static_cast<double>(before[i]));
      if (distance > 0) worst = std::max(worst, distance / most);
    }
  }
  return worst;
}

}  // namespace lamina_test
