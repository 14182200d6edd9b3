// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "lamina/detail/abi.hpp"

/// What <cmath> tells too, but by bits: with -ffast-math a compiler takes NaN and infinity for impossible.
namespace lamina::inline LAMINA_ABI::detail {

constexpr std::uint64_t magnitude_bits(double x) noexcept {
  return std::bit_cast<std::uint64_t>(x) & 0x7fff'ffff'ffff'ffffU;
}
inline constexpr std::uint64_t infinity_bits = 0x7ff0'0000'0000'0000U;

constexpr bool is_nan(double x) noexcept {
  return magnitude_bits(x) > infinity_bits;
}
constexpr bool is_finite(double x) noexcept {
  return magnitude_bits(x) < infinity_bits;
}

template <class T>
using bits_of = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

/// The larger of two magnitudes, NaN being the largest.
template <class T>
LAMINA_HOST_DEVICE constexpr T larger_magnitude(T a, T b) {
  return __builtin_bit_cast(bits_of<T>, a) < __builtin_bit_cast(bits_of<T>, b) ? b : a;
}

template <class T>
constexpr bool is_finite_magnitude(T magnitude) {
  return std::bit_cast<bits_of<T>>(magnitude) < std::bit_cast<bits_of<T>>(std::numeric_limits<T>::infinity());
}

}  // namespace lamina::inline LAMINA_ABI::detail
