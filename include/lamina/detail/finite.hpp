// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cstdint>

/// What <cmath> tells too, but by bits: with -ffast-math a compiler takes NaN and infinity for impossible.
namespace lamina::detail {

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

}  // namespace lamina::detail
