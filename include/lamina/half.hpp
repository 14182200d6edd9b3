// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/detail/simd.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#endif

/// Half-width storage: gradients that come as fp16 or bf16, and payloads that are sent so. Arithmetic is done in float
/// or double; these types only hold bits. A framework's own half type is used by viewing its memory as one of them. Read tensor.hpp before.
namespace lamina::inline LAMINA_ABI {

/// IEEE 754 binary16: 1 sign, 5 exponent and 10 mantissa bits.
struct float16 {
  std::uint16_t bits = 0;
  bool operator==(const float16&) const = default;
};

/// The upper half of a float: 1 sign, 8 exponent and 7 mantissa bits.
struct bfloat16 {
  std::uint16_t bits = 0;
  bool operator==(const bfloat16&) const = default;
};

template <class H>
concept half_element = std::same_as<H, float16> || std::same_as<H, bfloat16>;

/// The value, exactly. Infinity and NaN stay what they are. Does not depend on the flushing of denormals, and has no
/// branch, so that compilers vectorise a loop over it.
constexpr float to_float(float16 half) noexcept {
  // Signed, since SSE2 converts and shifts no others; what is shifted from the sign bit is all ones or none.
  const std::int32_t sign = static_cast<std::int32_t>(half.bits & 0x8000U) << 16;
  const std::int32_t magnitude = static_cast<std::int32_t>(half.bits & 0x7fffU);
  const std::int32_t is_denormal = (magnitude - 0x0400) >> 31;
  const std::int32_t is_not_finite = (0x7bff - magnitude) >> 31;
  constexpr std::int32_t rebias = (127 - 15) << 23;
  const std::int32_t normal = (magnitude << 13) + rebias + (rebias & is_not_finite);
  const std::int32_t denormal = std::bit_cast<std::int32_t>(static_cast<float>(magnitude) * 0x1p-24F);
  return std::bit_cast<float>(sign | (denormal & is_denormal) | (normal & ~is_denormal));
}

constexpr float to_float(bfloat16 half) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(half.bits) << 16U);
}

namespace detail {

// Drops the lower `dropped` bits of a number's bits, rounding to nearest, ties to even.
constexpr std::int32_t round_bits(std::int32_t bits, int dropped) noexcept {
  return (bits + (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)) >> dropped;
}

// The bits of the nearest float16 to the float whose bits are given, which is neither negative nor above 65,504. Without a branch
// and on signed integers, which SSE2 compares, so that compilers vectorise a loop over it.
constexpr std::int32_t round_in_range(std::int32_t magnitude) noexcept {
  constexpr std::int32_t smallest_normal = 0x38800000;  // 2^-14
  const std::int32_t normal = round_bits(magnitude - ((127 - 15) << 23), 13);
  // A multiple of 2^-24. Adding 2^23 rounds to the nearest integer, and leaves it in the mantissa.
  const float integer = std::bit_cast<float>(magnitude) * 0x1p24F + 0x1p23F;
  const std::int32_t denormal = std::bit_cast<std::int32_t>(integer) - 0x4b000000;
  const std::int32_t is_denormal = (magnitude - smallest_normal) >> 31;
  return (denormal & is_denormal) | (normal & ~is_denormal);
}

// The same of either half type to any finite float.
template <half_element Half>
constexpr std::int32_t round_magnitude(std::int32_t magnitude) noexcept {
  if constexpr (std::same_as<Half, bfloat16>) {
    constexpr std::int32_t largest = 0x7f7f;
    const std::int32_t rounded = round_bits(magnitude, 16);
    return rounded < largest ? rounded : largest;
  } else {
    constexpr std::int32_t largest = 0x477fe000;  // 65,504
    return round_in_range(largest + ((magnitude - largest) & ((magnitude - largest) >> 31)));
  }
}

// T itself, or a half-width type as T; exact.
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
      return std::bit_cast<V>(__builtin_convertvector(halves, vector_of<std::uint32_t>) << 16);
    } else
#if defined(__F16C__)
        if constexpr (std::same_as<T, float> && std::same_as<G, float16>) {
#if defined(__AVX512F__)
      return std::bit_cast<V>(
          _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
      return std::bit_cast<V>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#endif
    } else
#endif
#endif
    {
      // A loop of known length, which g++ -O2 vectorises, too.
      std::array<T, width<V, T>> operands;
      for (std::size_t i = 0; i < operands.size(); ++i) operands[i] = widened<T>(from[i]);
      return load<V>(operands.data());
    }
  }
}

/// `Count` elements, as T.
template <std::size_t Count, class T, class G>
LAMINA_ALWAYS_INLINE void widen_all(const G* from, T* to) noexcept {
  using V = native_register<T>;
  static_assert(Count % width<V, T> == 0);
  for (std::size_t i = 0; i < Count; i += width<V, T>) store(to + i, load_widened<V, T>(from + i));
}

}  // namespace detail

/// The nearest value of the type, ties to even; a finite number beyond its range becomes its largest number and not
/// infinity, since what a payload does not say stays in the residual. `value` must be finite.
template <half_element Half>
constexpr Half saturating_round(float value) noexcept {
  const auto all = std::bit_cast<std::int32_t>(value);
  const std::int32_t sign = (all >> 16) & 0x8000;
  return {static_cast<std::uint16_t>(sign | detail::round_magnitude<Half>(all & 0x7fffffff))};
}

}  // namespace lamina::inline LAMINA_ABI
