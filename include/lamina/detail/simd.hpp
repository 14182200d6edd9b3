// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstring>
#include <utility>

#include "lamina/detail/finite.hpp"

#if defined(__GNUC__) && (defined(__SSE2__) || defined(__aarch64__)) && !defined(LAMINA_NO_SIMD)
#define LAMINA_HAS_SIMD 1
#else
#define LAMINA_HAS_SIMD 0
#endif

/// What is inlined however large its caller is: pieces of the loops over elements, which would otherwise pass registers through memory.
#if defined(__GNUC__)
#define LAMINA_INLINED __attribute__((always_inline))
#define LAMINA_ALWAYS_INLINE LAMINA_INLINED inline
#else
#define LAMINA_INLINED
#define LAMINA_ALWAYS_INLINE inline
#endif

/// SIMD registers: an operand V is one element T or a register of them, and what is written over V serves both. And looking at magnitudes,
/// and for what is not finite: by bits, so that it also works under -ffast-math.
namespace lamina::inline LAMINA_ABI::detail {

#if LAMINA_HAS_SIMD
#if defined(__AVX512F__)
inline constexpr std::size_t register_bytes = 64;
#elif defined(__AVX__)
inline constexpr std::size_t register_bytes = 32;
#else
inline constexpr std::size_t register_bytes = 16;
#endif

// Each by itself, since g++ 12 forgets the attribute where the element's type is a parameter.
using floats [[gnu::vector_size(register_bytes)]] = float;
using doubles [[gnu::vector_size(register_bytes)]] = double;
using words32 [[gnu::vector_size(register_bytes)]] = std::uint32_t;
using words64 [[gnu::vector_size(register_bytes)]] = std::uint64_t;
using integers32 [[gnu::vector_size(register_bytes)]] = std::int32_t;
using integers64 [[gnu::vector_size(register_bytes)]] = std::int64_t;
floats vector_like(float);
doubles vector_like(double);
words32 vector_like(std::uint32_t);
words64 vector_like(std::uint64_t);
integers32 vector_like(std::int32_t);
integers64 vector_like(std::int64_t);
template <class T>
using vector_of = decltype(vector_like(T()));

/// The widest register of the instruction set that is compiled for, full of T: the vectors of the compilers of GNU and LLVM, whose
/// operators are those of single elements, rounded as these are; xsimd gave
/// other bits on some instruction sets.
template <class T>
struct simd {
  using value_type = T;
  vector_of<T> data;

  simd() = default;
  /// The element in every place; from it alone, since 0 taken from it changes nothing, -0 and NaN included.
  LAMINA_ALWAYS_INLINE simd(T element) : data(element - vector_of<T>{}) {}
  LAMINA_ALWAYS_INLINE explicit simd(vector_of<T> vector) : data(vector) {}

  LAMINA_ALWAYS_INLINE friend simd operator+(simd a, simd b) { return simd(a.data + b.data); }
  LAMINA_ALWAYS_INLINE friend simd operator-(simd a, simd b) { return simd(a.data - b.data); }
  LAMINA_ALWAYS_INLINE friend simd operator*(simd a, simd b) { return simd(a.data * b.data); }
  LAMINA_ALWAYS_INLINE friend simd operator/(simd a, simd b) { return simd(a.data / b.data); }
  LAMINA_ALWAYS_INLINE friend simd operator-(simd a) { return simd(-a.data); }
  LAMINA_ALWAYS_INLINE friend simd operator&(simd a, simd b) { return simd(a.data & b.data); }
  LAMINA_ALWAYS_INLINE friend simd operator|(simd a, simd b) { return simd(a.data | b.data); }
};
#endif

template <class V>
inline constexpr bool is_register = false;
#if LAMINA_HAS_SIMD
template <class T>
inline constexpr bool is_register<simd<T>> = true;
template <class T>
using native_register = simd<T>;
#else
template <class T>
using native_register = T;
#endif

template <class V, class T>
inline constexpr std::size_t width = sizeof(V) / sizeof(T);

/// From where elements need not be aligned to more than their own size.
template <class V, class T>
LAMINA_ALWAYS_INLINE V load(const T* from) {
  if constexpr (std::same_as<V, T>) {
    return *from;
  } else {
    V value;
    std::memcpy(&value.data, from, sizeof value.data);
    return value;
  }
}

template <class V, class T>
LAMINA_ALWAYS_INLINE void store(T* to, const V& value) {
  if constexpr (std::same_as<V, T>) {
    *to = value;
  } else {
    std::memcpy(to, &value.data, sizeof value.data);
  }
}

/// How many operands of the 64 lanes are loaded, looked at and written together: four registers, few enough for every machine, or, where V
/// is one element, all of them, a group for the compiler to vectorise.
template <class V, class T>
inline constexpr std::size_t group_of = std::same_as<V, T> ? lanes
                                                           : std::min<std::size_t>(4, lanes / width<V, T>);

/// Calls body(0) to body(Count - 1). Written out where V is a register, since g++ -O2 leaves such a loop a loop, and its registers in
/// memory; a loop where V is one element, which that vectorises. Without this a pass takes about three times as long at -O2.
template <class V, std::size_t Count, class Body>
LAMINA_ALWAYS_INLINE void repeat(const Body& body) {
  if constexpr (is_register<V>) {
    [&]<std::size_t... Index>(std::index_sequence<Index...>) LAMINA_INLINED {
      (body(Index), ...);
    }
    (std::make_index_sequence<Count>{});
  } else {
    for (std::size_t i = 0; i < Count; ++i) body(i);
  }
}

/// Whether body(0) to body(Count - 1) are all true, written out; ends at the first that is not.
template <std::size_t Count, class Body>
LAMINA_ALWAYS_INLINE bool all_of_written_out(const Body& body) {
  bool all = true;
  [&]<std::size_t... Index>(std::index_sequence<Index...>) LAMINA_INLINED {
    all = (body(Index) && ...);
  }
  (std::make_index_sequence<Count>{});
  return all;
}

/// A compiler may fuse the product of a square with the sum into one rounding where the machine has FMA. The values must
/// not depend on that, so mapped values pass through memory, or registers through a statement that hides them.
template <class T, std::size_t Count>
LAMINA_ALWAYS_INLINE void round_by_itself([[maybe_unused]] std::array<T, Count>& values) {
#if defined(__GNUC__)
  if constexpr (!is_register<T>) {
    asm volatile("" : "+m"(values));
  } else {
#if defined(__AVX512F__)
    repeat<T, Count>([&](std::size_t i) LAMINA_INLINED { asm volatile("" : "+v"(values[i].data)); });
#elif defined(__SSE2__)
    repeat<T, Count>([&](std::size_t i) LAMINA_INLINED { asm volatile("" : "+x"(values[i].data)); });
#elif defined(__ARM_NEON)
    repeat<T, Count>([&](std::size_t i) LAMINA_INLINED { asm volatile("" : "+w"(values[i].data)); });
#else
    asm volatile("" : "+m"(values));
#endif
  }
#endif
}

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

/// The sign bits of a register of 4 or 8 byte patterns, by the instruction for that; of one of 64 bytes, of both halves together.
template <class Pattern>
LAMINA_ALWAYS_INLINE int gathered_signs(const simd<Pattern>& seen) {
#if defined(__AVX512F__)
  const auto words = std::bit_cast<simd<std::uint64_t>>(seen).data;
  const auto folded =
      __builtin_shufflevector(words, words, 0, 1, 2, 3) | __builtin_shufflevector(words, words, 4, 5, 6, 7);
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
    repeat<V, Count>([&](std::size_t i) LAMINA_INLINED {
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

}  // namespace lamina::inline LAMINA_ABI::detail
