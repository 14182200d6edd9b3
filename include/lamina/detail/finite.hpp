// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "lamina/detail/abi.hpp"

/// What <cmath> tells too, but by bits: with -ffast-math a compiler takes NaN and infinity for impossible.
namespace lamina::inline LAMINA_ABI::detail {

// By a builtin, since functions of the standard library are the host's alone.
LAMINA_HOST_DEVICE constexpr std::uint64_t magnitude_bits(double x) noexcept {
  return __builtin_bit_cast(std::uint64_t, x) & 0x7fff'ffff'ffff'ffffU;
}
inline constexpr std::uint64_t infinity_bits = 0x7ff0'0000'0000'0000U;

LAMINA_HOST_DEVICE constexpr bool is_nan(double x) noexcept {
  return magnitude_bits(x) > infinity_bits;
}
LAMINA_HOST_DEVICE constexpr bool is_finite(double x) noexcept {
  return magnitude_bits(x) < infinity_bits;
}

template <class T>
using bits_of = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

/// The larger of two magnitudes, NaN being the largest.
template <class T>
LAMINA_HOST_DEVICE constexpr T larger_magnitude(T a, T b) {
  return __builtin_bit_cast(bits_of<T>, a) < __builtin_bit_cast(bits_of<T>, b) ? b : a;
}

inline constexpr double infinite_value = std::numeric_limits<double>::infinity();

/// A value as the threshold sees it: NaN counts as infinity, so that its layer goes out first and does not wait for ever.
LAMINA_HOST_DEVICE constexpr double ordered_value(double value) {
  return is_nan(value) ? infinite_value : value;  // NOLINT: clang-tidy 14 takes infinity for narrowed
}

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
