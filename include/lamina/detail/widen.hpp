// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/simd.hpp"
#include "lamina/half.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#endif

/// Elements of half the width as the type that is computed with.
namespace lamina::inline LAMINA_ABI::detail {

/// T itself, or a half-width type as T; exact.
template <class T, class G>
constexpr T widened(G element) noexcept {
  if constexpr (half_element<G>) {
    return static_cast<T>(to_float(element));
  } else {
    static_assert(std::same_as<G, T>);
    return element;
  }
}

#if LAMINA_HAS_SIMD
using half_patterns [[gnu::vector_size(register_bytes / 2)]] = std::uint16_t;
#endif

/// One operand from where its elements lie: of T, or of half the width and widened. With F16C a signalling NaN of float16 comes out
/// quiet, which it would by the sum or the product that follows.
template <class V, class T, class G>
LAMINA_ALWAYS_INLINE V load_widened(const G* from) noexcept {
  if constexpr (std::same_as<G, T>) {
    return load<V>(from);
  } else if constexpr (std::same_as<V, T>) {
    return widened<T>(*from);
  } else {
#if LAMINA_HAS_SIMD
    if constexpr (std::same_as<T, float> && std::same_as<G, bfloat16>) {
      half_patterns halves;
      std::memcpy(&halves, from, sizeof halves);
      return std::bit_cast<V>(__builtin_convertvector(halves, vector_of<std::uint32_t>::type) << 16);
    }
#if defined(__F16C__)
    if constexpr (std::same_as<T, float> && std::same_as<G, float16>) {
#if defined(__AVX512F__)
      return std::bit_cast<V>(
          _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
      return std::bit_cast<V>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#endif
    }
#endif
#endif
    // A loop of known length, which g++ -O2 vectorises, too.
    std::array<T, width<V, T>> operands;
    for (std::size_t i = 0; i < operands.size(); ++i) operands[i] = widened<T>(from[i]);
    return load<V>(operands.data());
  }
}

/// `Count` elements, as T.
template <std::size_t Count, class T, class G>
LAMINA_ALWAYS_INLINE void widen_all(const G* from, T* to) noexcept {
  using V = native_register<T>;
  static_assert(Count % width<V, T> == 0);
  for (std::size_t i = 0; i < Count; i += width<V, T>) store(to + i, load_widened<V, T>(from + i));
}

}  // namespace lamina::inline LAMINA_ABI::detail
