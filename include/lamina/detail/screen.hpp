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

#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/simd.hpp"

/// Looking at magnitudes, and for what is not finite. All of it tests bits, so that it also works under -ffast-math.
namespace lamina::inline LAMINA_ABI::detail {

/// The bits of an element of G, as a number.
template <class G>
using pattern_of = std::conditional_t<sizeof(G) == 2, std::uint16_t,
                                      std::conditional_t<sizeof(G) == 4, std::uint32_t, std::uint64_t>>;
template <class Pattern>
inline constexpr Pattern sign_bit = static_cast<Pattern>(Pattern{1} << (8 * sizeof(Pattern) - 1));

template <class Pattern>
constexpr Pattern magnitude_of_pattern(Pattern pattern) {
  return static_cast<Pattern>(pattern & static_cast<Pattern>(~sign_bit<Pattern>));
}

/// What, added to a magnitude, carries into the sign bit exactly from the pattern `first` on; first <= infinity's.
template <class Pattern>
constexpr Pattern carry_from(Pattern first) {
  return static_cast<Pattern>(sign_bit<Pattern> - first);
}

#if LAMINA_HAS_SIMD && defined(__SSE2__)
#if defined(__AVX__)
using signs_of_floats [[gnu::vector_size(32)]] = float;
using signs_of_doubles [[gnu::vector_size(32)]] = double;
#else
using signs_of_floats [[gnu::vector_size(16)]] = float;
using signs_of_doubles [[gnu::vector_size(16)]] = double;
#endif

/// The sign bits of a register of 4 or 8 byte patterns, gathered by the instruction that does that; of one of 64 bytes, of
/// both halves together.
template <class Pattern>
LAMINA_ALWAYS_INLINE int gathered_signs(const simd<Pattern>& seen) {
#if defined(__AVX512F__)
  const auto words = std::bit_cast<simd<std::uint64_t>>(seen).data;
#if defined(__clang__) || __GNUC__ >= 12
  const auto folded =
      __builtin_shufflevector(words, words, 0, 1, 2, 3) | __builtin_shufflevector(words, words, 4, 5, 6, 7);
#else
  using half [[gnu::vector_size(32)]] = std::uint64_t;
  const auto halves = std::bit_cast<std::array<half, 2>>(words);
  const half folded = halves[0] | halves[1];
#endif
#else
  const auto folded = seen.data;
#endif
#if defined(__AVX__)
  if constexpr (sizeof(Pattern) == 4)
    return __builtin_ia32_movmskps256(std::bit_cast<signs_of_floats>(folded));
  return __builtin_ia32_movmskpd256(std::bit_cast<signs_of_doubles>(folded));
#else
  if constexpr (sizeof(Pattern) == 4) return __builtin_ia32_movmskps(std::bit_cast<signs_of_floats>(folded));
  return __builtin_ia32_movmskpd(std::bit_cast<signs_of_doubles>(folded));
#endif
}
#endif

/// Whether the sign bit of a pattern, or of any in a register, is set.
template <class Bits>
LAMINA_ALWAYS_INLINE bool any_sign(const Bits& seen) {
  if constexpr (!is_register<Bits>) {
    return (seen & sign_bit<Bits>) != 0;
  } else {
#if LAMINA_HAS_SIMD
    using pattern = typename Bits::value_type;
#if defined(__SSE2__)
    if constexpr (sizeof(pattern) >= 4) return gathered_signs(seen) != 0;
#endif
    const auto folded = std::bit_cast<simd<std::uint64_t>>(seen & Bits(sign_bit<pattern>));
    std::uint64_t any = 0;
    for (std::size_t i = 0; i < width<Bits, std::uint64_t>; ++i) any |= folded.data[i];
    return any != 0;
#endif
  }
}

/// The magnitude of each element of a register.
template <class T>
LAMINA_ALWAYS_INLINE native_register<T> magnitudes(const native_register<T>& x) {
  using patterns = native_register<pattern_of<T>>;
  return std::bit_cast<native_register<T>>(std::bit_cast<patterns>(x) &
                                           patterns(static_cast<pattern_of<T>>(~sign_bit<pattern_of<T>>)));
}

#if LAMINA_HAS_SIMD
/// Of each place.
template <class T>
LAMINA_ALWAYS_INLINE simd<T> larger_magnitude(const simd<T>& a, const simd<T>& b) {
  using patterns = simd<bits_of<T>>;  // signed, as instruction sets compare
  return simd<T>(std::bit_cast<patterns>(a).data < std::bit_cast<patterns>(b).data ? b.data : a.data);
}
#endif

/// What all magnitudes that are finite are below.
template <class T>
inline constexpr pattern_of<T> infinity_carry =
    carry_from(std::bit_cast<pattern_of<T>>(std::numeric_limits<T>::infinity()));

/// Whether the magnitudes of all of these elements or registers are below the one that `carry` is of.
template <class T, class V, std::size_t Count>
LAMINA_ALWAYS_INLINE bool all_below(const std::array<V, Count>& operands, pattern_of<T> carry) {
  using pattern = pattern_of<T>;
  if constexpr (std::same_as<V, T>) {
    pattern seen = 0;
    for (const T each : operands) seen |= magnitude_of_pattern(std::bit_cast<pattern>(each)) + carry;
    return !any_sign(seen);
  } else {
    using patterns = native_register<pattern>;
    const patterns carries(carry);
    patterns seen(0);
    repeat<V, Count>([&](std::size_t i) LAMINA_INLINED_LAMBDA {
      // The magnitude as the functors take it, so that both share one instruction.
      seen = seen | (std::bit_cast<patterns>(magnitudes<T>(operands[i])) + carries);
    });
    return !any_sign(seen);
  }
}

/// Whether all of these elements or registers are finite.
template <class T, class V, std::size_t Count>
LAMINA_ALWAYS_INLINE bool all_finite(const std::array<V, Count>& operands) {
  return all_below<T>(operands, infinity_carry<T>);
}

/// The largest magnitude among `count` operands; NaN and infinity come out as such.
template <class T, class Source>
T largest_magnitude(std::size_t count, const Source source) {
  using V = native_register<T>;
  // The patterns of magnitudes order like the magnitudes, with infinity and NaN at the top.
  const auto magnitude_at = [&](std::size_t i) {
    return magnitude_of_pattern(std::bit_cast<pattern_of<T>>(source.at(i)));
  };
  pattern_of<T> largest = 0;
  std::size_t i = 0;
  const std::size_t whole = count - count % lanes;
  if constexpr (is_register<V>) {
    // Registers know the larger of two floats, but not all of them that of two integers. What is not finite is left to
    // the patterns.
    constexpr std::size_t step = width<V, T>;
    constexpr std::size_t group = group_of<V, T, lanes>;
    std::array<V, group> most;
    most.fill(V(T(0)));
    bool finite = true;
    for (; i < whole && finite; i += lanes) {
      source.prefetch(i, lanes);
      for (std::size_t k = i; k < i + lanes; k += group * step) {
        std::array<V, group> operands;
        repeat<V, group>([&](std::size_t r)
                             LAMINA_INLINED_LAMBDA { operands[r] = source.template at<V>(k + r * step); });
        finite = finite && all_finite<T>(operands);
        repeat<V, group>([&](std::size_t r) LAMINA_INLINED_LAMBDA {
          const V magnitude = magnitudes<T>(operands[r]);
          most[r] = V(most[r].data < magnitude.data ? magnitude.data : most[r].data);
        });
      }
    }
    if (finite) {
      std::array<T, step> lane;
      for (const V& each : most) {
        detail::store(lane.data(), each);
        for (const T magnitude : lane) largest = (std::max)(largest, std::bit_cast<pattern_of<T>>(magnitude));
      }
    } else {
      i = 0;
    }
  } else {
    std::array<pattern_of<T>, lanes> most{};
    for (; i < whole; i += lanes) {
      source.prefetch(i, lanes);
      for (std::size_t k = 0; k < lanes; ++k) most[k] = (std::max)(most[k], magnitude_at(i + k));
    }
    largest = *std::ranges::max_element(most);
  }
  for (; i < count; ++i) largest = (std::max)(largest, magnitude_at(i));
  return std::bit_cast<T>(largest);
}

}  // namespace lamina::inline LAMINA_ABI::detail
