// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>

#include "lamina/detail/abi.hpp"

/// Numbers that are the same bits on every machine.
namespace lamina::inline LAMINA_ABI::detail {

/// The value as memory would round it: a compiler may otherwise fuse a product with the sum that follows into one rounding
/// where the machine has FMA, and machines would decide differently.
template <class T>
T rounded(T value) {
#if defined(__GNUC__)
  asm volatile("" : "+m"(value));
#endif
  return value;
}

/// base^exponent, of a base in [0, 1] and an exponent in (0, 1]; wrong by less than 1e-14. Of products and square roots, each of which
/// IEEE 754 rounds, where std::pow is as the C library has it.
inline double root_power(double base, double exponent) {
  double result = 1;
  double root = base;
  while (exponent > 0) {
    if (exponent >= 1) {
      result = rounded(result * root);
      exponent -= 1;
    }
    root = std::sqrt(root);
    exponent *= 2;
  }
  return result;
}

}  // namespace lamina::inline LAMINA_ABI::detail
