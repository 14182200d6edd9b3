// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstddef>

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

/// `Count` elements, as T. A loop of known length, so that g++ -O2 vectorises it too. With F16C a signalling NaN
/// of float16 comes out quiet, which it would by the sum or the product that follows.
template <std::size_t Count, class T, class G>
LAMINA_ALWAYS_INLINE void widen_all(const G* from, T* to) noexcept {
#if defined(__F16C__)
  if constexpr (std::same_as<G, float16>) {
    static_assert(Count % 8 == 0);
    for (std::size_t i = 0; i < Count; i += 8) {
      const __m256 floats = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
      if constexpr (sizeof(T) == 4) {
        _mm256_storeu_ps(to + i, floats);
      } else {
        _mm256_storeu_pd(to + i, _mm256_cvtps_pd(_mm256_castps256_ps128(floats)));
        _mm256_storeu_pd(to + i + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(floats, 1)));
      }
    }
    return;
  }
#endif
  for (std::size_t i = 0; i < Count; ++i) to[i] = widened<T>(from[i]);
}

}  // namespace lamina::inline LAMINA_ABI::detail
