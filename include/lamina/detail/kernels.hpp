// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#if !defined(LAMINA_NO_XSIMD) && __has_include(<xsimd/xsimd.hpp>)
#include <xsimd/xsimd.hpp>
#define LAMINA_HAS_XSIMD 1
#else
#define LAMINA_HAS_XSIMD 0
#endif

/// The loops that touch every element, one block at a time. Each is written once, over an operand V that is
/// either one element or a SIMD register of them; both give the same bits (see reduction.hpp).
namespace lamina::detail {

inline constexpr std::size_t block_elements = 4096;
inline constexpr std::size_t lanes = 64;

template <class V, class T>
inline constexpr std::size_t width = sizeof(V) / sizeof(T);

template <class V, class T>
V load(const T* from) {
  if constexpr (std::same_as<V, T>) {
    return *from;
  } else {
    return V::load_unaligned(from);
  }
}

template <class V, class T>
void store(T* to, const V& value) {
  if constexpr (std::same_as<V, T>) {
    *to = value;
  } else {
    value.store_unaligned(to);
  }
}

/// A compiler may fuse the product of a square with the sum into one rounding where the machine has FMA. The
/// values must not depend on that, so mapped values pass through memory.
template <class T>
void round_in_memory([[maybe_unused]] T& values) {
#if defined(__GNUC__)
  asm volatile("" : "+m"(values));
#endif
}

/// Sources: where the operand at index i comes from.
template <class T>
struct read_only {
  const T* from;
  template <class V>
  V at(std::size_t i) const {
    return load<V>(from + i);
  }
};

template <class T>
struct sum_of {
  const T* residual;
  const T* gradient;
  template <class V>
  V at(std::size_t i) const {
    return load<V>(residual + i) + load<V>(gradient + i);
  }
};

template <class T>
struct add_and_write {
  T* residual;
  const T* gradient;
  template <class V>
  V at(std::size_t i) const {
    const V updated = load<V>(residual + i) + load<V>(gradient + i);
    detail::store(residual + i, updated);  // qualified: xsimd::store would be found and wants alignment
    return updated;
  }
};

#if LAMINA_HAS_XSIMD
template <class T>
using native_register = xsimd::batch<T>;
#else
template <class T>
using native_register = T;
#endif

template <class F, class V>
concept maps_to_itself = requires(const F& functor, const V& x) {
  { functor.map(x) } -> std::same_as<V>;
  { functor.combine(x, x) } -> std::same_as<V>;
};

/// A whole register where the functor can map one, one element otherwise.
template <class F, class T>
using operand = std::conditional_t<maps_to_itself<F, native_register<T>>, native_register<T>, T>;

/// Combines `count` <= block_elements operands in the shared order; returns the block's total.
template <class T, class V, class F, class Source>
double block_total_over(const F& functor, std::size_t count, const Source& source) {
  using Lane = std::remove_cvref_t<decltype(functor.map(T{}))>;
  std::array<Lane, lanes> lane{};
  const std::size_t whole = count - count % lanes;

  if constexpr (std::same_as<V, T>) {
    std::array<Lane, lanes> mapped;
    for (std::size_t i = 0; i < whole; i += lanes) {
      for (std::size_t j = 0; j < lanes; ++j) mapped[j] = functor.map(source.template at<T>(i + j));
      round_in_memory(mapped);
      for (std::size_t j = 0; j < lanes; ++j) lane[j] = functor.combine(lane[j], mapped[j]);
    }
  } else {
    constexpr std::size_t registers = lanes / width<V, T>;
    std::array<V, registers> sums;
    sums.fill(V(T(0)));
    for (std::size_t i = 0; i < whole; i += lanes) {
      for (std::size_t r = 0; r < registers; ++r) {
        sums[r] = functor.combine(sums[r], functor.map(source.template at<V>(i + r * width<V, T>)));
      }
    }
    for (std::size_t r = 0; r < registers; ++r) detail::store(lane.data() + r * width<V, T>, sums[r]);
  }

  for (std::size_t i = whole; i < count; ++i) {
    Lane mapped = functor.map(source.template at<T>(i));
    round_in_memory(mapped);
    lane[i - whole] = functor.combine(lane[i - whole], mapped);
  }
  for (std::size_t half = lanes / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lane[j] = functor.combine(lane[j], lane[j + half]);
  }
  return static_cast<double>(lane[0]);
}

template <class T, class F, class Source>
double block_total(const F& functor, std::size_t count, const Source& source) {
  return block_total_over<T, operand<F, T>>(functor, count, source);
}

template <class T>
using bits_of = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

template <class T>
inline constexpr bits_of<T> infinity_bits = std::bit_cast<bits_of<T>>(std::numeric_limits<T>::infinity());

/// The largest magnitude among `count` operands, as the bits of |x|: they order like the magnitudes, and NaN
/// and infinity lie at and above infinity_bits. A test of bits, so that it also works under -ffast-math.
template <class T, class Source>
bits_of<T> largest_magnitude_bits(std::size_t count, const Source& source) {
  constexpr bits_of<T> magnitude_mask = std::numeric_limits<bits_of<T>>::max();
  const auto magnitude = [&](std::size_t i) {
    return std::bit_cast<bits_of<T>>(source.template at<T>(i)) & magnitude_mask;
  };
  std::array<bits_of<T>, lanes> largest{};
  const std::size_t whole = count - count % lanes;
  for (std::size_t i = 0; i < whole; i += lanes) {
    for (std::size_t j = 0; j < lanes; ++j) largest[j] = std::max(largest[j], magnitude(i + j));
  }
  for (std::size_t i = whole; i < count; ++i) largest[i - whole] = std::max(largest[i - whole], magnitude(i));
  return *std::max_element(largest.begin(), largest.end());
}

}  // namespace lamina::detail
