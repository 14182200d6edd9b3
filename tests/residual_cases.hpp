// SPDX-License-Identifier: MIT
#pragma once

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

inline lamina::residual_options with_check(lamina::non_finite check, double momentum = 0) {
  return {.non_finite = check, .momentum = momentum};
}

}  // namespace lamina_test
