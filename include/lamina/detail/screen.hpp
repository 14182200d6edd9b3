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
#include "lamina/detail/block.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/rounding.hpp"
#include "lamina/detail/simd.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/detail/widen.hpp"
#include "lamina/half.hpp"

/// Looking through elements for what is not finite. All of it tests bits, so that it also works under -ffast-math.
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

/// Whether all of these elements or registers are finite.
template <class T, class V, std::size_t Count>
LAMINA_ALWAYS_INLINE bool all_finite(const std::array<V, Count>& operands) {
  using pattern = pattern_of<T>;
  constexpr pattern carry = carry_from(std::bit_cast<pattern>(std::numeric_limits<T>::infinity()));
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

/// Magnitudes below this are called small: 2^26 of them can be added before a float may overflow.
template <class T>
inline constexpr T small_magnitude = sizeof(T) == 4 ? static_cast<T>(0x1p100) : static_cast<T>(0x1p990);

/// Looks through elements of G for those that are not small as T, times a scale if there is one. It compares the bits as
/// they lie in memory with those of the first magnitude that is not small, which it looks for once: halves need no
/// conversion, and nothing is multiplied. With a scale that costs 16 to 64 products, so make one for many blocks.
template <class T, class G = T>
class screen {
 public:
  constexpr screen() : carry_(carry_from(first_not_small([](T element) { return element; }))) {}
  explicit screen(T scale)
      : carry_(carry_from(first_not_small([scale](T element) { return rounded(element * scale); }))) {}

  /// Whether all of them are small; NaN and infinity are not.
  bool all_small(const G* from, std::size_t count) const {
    using V = native_register<pattern>;
    constexpr std::size_t row_bytes =
        256;  // where V is one element: a loop that compilers vectorise and do not unroll
    constexpr std::size_t step = width<V, pattern>;
    constexpr std::size_t group = group_of<V, pattern, row_bytes / sizeof(pattern)>;
    const V carries(carry_);
    const V magnitudes(magnitude_of_pattern(static_cast<pattern>(~pattern{0})));
    std::array<V, group> seen;
    seen.fill(V(0));
    const std::size_t whole = count - count % (group * step);
    for (std::size_t i = 0; i < whole; i += group * step) {
      prefetch_ahead(from + i, group * step);
      repeat<V, group>([&](std::size_t r) LAMINA_INLINED_LAMBDA {
        const V magnitude = static_cast<V>(patterns_at<V>(from + i + r * step) & magnitudes);
        seen[r] = static_cast<V>(seen[r] | static_cast<V>(magnitude + carries));
      });
    }
    pattern rest = 0;
    for (std::size_t i = whole; i < count; ++i) {
      const pattern magnitude = magnitude_of_pattern(patterns_at<pattern>(from + i));
      rest = static_cast<pattern>(rest | static_cast<pattern>(magnitude + carry_));
    }
    bool any = any_sign(rest);
    for (const V& each : seen) any |= any_sign(each);
    return !any;
  }

 private:
  using pattern = pattern_of<G>;

  template <class V>
  LAMINA_ALWAYS_INLINE static V patterns_at(const G* from) {
    if constexpr (half_element<G>) {
      return load<V>(&from->bits);
    } else if constexpr (std::same_as<V, pattern>) {
      return std::bit_cast<pattern>(*from);
    } else {
      return std::bit_cast<V>(load<native_register<G>>(from));
    }
  }

  // Magnitudes, and their products with one number, grow with their patterns; those of infinity are never small.
  template <class Product>
  static constexpr pattern first_not_small(const Product& product) {
    pattern first = 0;
    pattern last = infinity_pattern();
    while (first < last) {
      const auto middle = static_cast<pattern>(first + (last - first) / 2);
      const T value = product(widened<T>(std::bit_cast<G>(middle)));
      const bool is_small = magnitude_of_pattern(std::bit_cast<pattern_of<T>>(value)) <
                            std::bit_cast<pattern_of<T>>(small_magnitude<T>);
      (is_small ? first : last) = static_cast<pattern>(is_small ? middle + 1 : middle);
    }
    return first;
  }

  static constexpr pattern infinity_pattern() {
    if constexpr (std::same_as<G, float16>) {
      return 0x7c00;
    } else if constexpr (std::same_as<G, bfloat16>) {
      return 0x7f80;
    } else {
      return std::bit_cast<pattern>(std::numeric_limits<G>::infinity());
    }
  }

  pattern carry_;
};

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
      const auto row = source.template row<V>(i);
      for (std::size_t k = 0; k < lanes; k += group * step) {
        std::array<V, group> operands;
        repeat<V, group>([&](std::size_t r)
                             LAMINA_INLINED_LAMBDA { operands[r] = row.template at<V>(k + r * step); });
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
      const auto row = source.template row<T>(i);
      for (std::size_t k = 0; k < lanes; ++k) {
        most[k] =
            (std::max)(most[k], magnitude_of_pattern(std::bit_cast<pattern_of<T>>(row.template at<T>(k))));
      }
    }
    largest = *std::ranges::max_element(most);
  }
  for (; i < count; ++i) largest = (std::max)(largest, magnitude_at(i));
  return std::bit_cast<T>(largest);
}

/// As the screen without a scale.
template <class T, class G>
bool all_small(std::size_t count, const read_only<T, G>& source) {
  return screen<T, G>().all_small(source.from, count);
}

}  // namespace lamina::inline LAMINA_ABI::detail
