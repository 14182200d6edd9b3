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

#include "lamina/half.hpp"

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

/// One operand of T from memory that holds G: T itself, or a half-width type, which goes element by element.
template <class V, class T, class G>
V load_as(const G* from) {
  if constexpr (std::same_as<G, T>) {
    return load<V>(from);
  } else {
    static_assert(std::same_as<V, T>);
    return static_cast<T>(to_float(*from));
  }
}

/// Sources: where the operand at index i comes from, as a V of T.
template <class T, class G = T>
struct read_only {
  const G* from;
  template <class V>
  V at(std::size_t i) const {
    return load_as<V, T>(from + i);
  }
};

template <class T, class G = T>
struct sum_of {
  const T* residual;
  const G* gradient;
  template <class V>
  V at(std::size_t i) const {
    return load<V>(residual + i) + load_as<V, T>(gradient + i);
  }
};

template <class T, class G = T>
struct add_and_write {
  T* residual;
  const G* gradient;
  template <class V>
  V at(std::size_t i) const {
    const V updated = load<V>(residual + i) + load_as<V, T>(gradient + i);
    detail::store(residual + i, updated);  // qualified: xsimd::store would be found and wants alignment
    return updated;
  }
};

/// For a residual that is clear: what add_and_write would give, without reading the residual.
template <class T, class G = T>
struct assign {
  T* residual;
  const G* gradient;
  template <class V>
  V at(std::size_t i) const {
    const V updated = V(T(0)) + load_as<V, T>(gradient + i);  // turns -0 into 0, as the sum does
    detail::store(residual + i, updated);
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

/// A whole register where the functor can map one and memory holds T itself, one element otherwise.
template <class F, class T, class G>
using operand =
    std::conditional_t<std::same_as<T, G> && maps_to_itself<F, native_register<T>>, native_register<T>, T>;

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

template <class T, class F, template <class, class> class Source, class G>
double block_total(const F& functor, std::size_t count, const Source<T, G>& source) {
  return block_total_over<T, operand<F, T, G>>(functor, count, source);
}

template <class T>
using bits_of = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

/// Magnitudes below this are called small: 2^26 of them can be added before a float may overflow.
template <class T>
inline constexpr T small_magnitude = sizeof(T) == 4 ? static_cast<T>(0x1p100) : static_cast<T>(0x1p990);

/// Whether all operands are small; NaN and infinity are not. A test of bits, so that it also works under -ffast-math.
template <class T, class Source>
bool all_small(std::size_t count, const Source& source) {
  using bits = std::make_unsigned_t<bits_of<T>>;
  constexpr bits sign = bits{1} << (8 * sizeof(bits) - 1);
  // Carries into the sign bit exactly for magnitudes that are not small.
  constexpr bits carry = sign - std::bit_cast<bits>(small_magnitude<T>);
  const auto probe = [&](std::size_t i) {
    return (std::bit_cast<bits>(source.template at<T>(i)) & ~sign) + carry;
  };
  constexpr std::size_t probes = 64 / sizeof(T);  // one cache line: few enough to stay in registers
  std::array<bits, probes> seen{};
  const std::size_t whole = count - count % probes;
  for (std::size_t i = 0; i < whole; i += probes) {
    for (std::size_t j = 0; j < probes; ++j) seen[j] |= probe(i + j);
  }
  for (std::size_t i = whole; i < count; ++i) seen[0] |= probe(i);
  bits any = 0;
  for (const bits each : seen) any |= each;
  return (any & sign) == 0;
}

/// The largest magnitude among `count` operands; NaN and infinity come out as such.
template <class T, class Source>
T largest_magnitude(std::size_t count, const Source& source) {
  bits_of<T> largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    constexpr bits_of<T> magnitude_mask = std::numeric_limits<bits_of<T>>::max();
    // The bits of magnitudes order like the magnitudes, with infinity and NaN at the top.
    largest = std::max(largest, std::bit_cast<bits_of<T>>(source.template at<T>(i)) & magnitude_mask);
  }
  return std::bit_cast<T>(largest);
}

/// The larger of two magnitudes, NaN being the largest.
template <class T>
T larger_magnitude(T a, T b) {
  return std::bit_cast<bits_of<T>>(a) < std::bit_cast<bits_of<T>>(b) ? b : a;
}

template <class T>
bool is_finite_magnitude(T magnitude) {
  return std::bit_cast<bits_of<T>>(magnitude) < std::bit_cast<bits_of<T>>(std::numeric_limits<T>::infinity());
}

}  // namespace lamina::detail
