// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "lamina/detail/abi.hpp"

#if defined(__GNUC__) && (defined(__SSE2__) || defined(__aarch64__)) && !defined(LAMINA_NO_SIMD)
#define LAMINA_HAS_SIMD 1
#else
#define LAMINA_HAS_SIMD 0
#endif

/// What is inlined however large its caller is: pieces of the loops over elements, which would otherwise pass registers
/// through memory.
#if defined(__GNUC__)
#define LAMINA_INLINED_LAMBDA __attribute__((always_inline))
#define LAMINA_ALWAYS_INLINE LAMINA_INLINED_LAMBDA inline
#else
#define LAMINA_INLINED_LAMBDA
#define LAMINA_ALWAYS_INLINE inline
#endif

/// SIMD registers: an operand V is one element T or a register of them, and what is written over V serves both.
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
template <class T>
struct vector_of;
template <>
struct vector_of<float> {
  using type [[gnu::vector_size(register_bytes)]] = float;
};
template <>
struct vector_of<double> {
  using type [[gnu::vector_size(register_bytes)]] = double;
};
template <>
struct vector_of<std::uint16_t> {
  using type [[gnu::vector_size(register_bytes)]] = std::uint16_t;
};
template <>
struct vector_of<std::uint32_t> {
  using type [[gnu::vector_size(register_bytes)]] = std::uint32_t;
};
template <>
struct vector_of<std::uint64_t> {
  using type [[gnu::vector_size(register_bytes)]] = std::uint64_t;
};
template <>
struct vector_of<std::int32_t> {
  using type [[gnu::vector_size(register_bytes)]] = std::int32_t;
};
template <>
struct vector_of<std::int64_t> {
  using type [[gnu::vector_size(register_bytes)]] = std::int64_t;
};

/// The widest register of the instruction set that is compiled for, full of T: the vectors of the compilers of GNU and LLVM,
/// whose operators are those of single elements, rounded as these are. docs/decisions/0014-registers-of-the-compiler.md has
/// why not a library's.
template <class T>
struct simd {
  using value_type = T;
  typename vector_of<T>::type data;

  simd() = default;
  /// The element in every place; from it alone, since 0 taken from it changes nothing, -0 and NaN included.
  LAMINA_ALWAYS_INLINE simd(T element) : data(element - typename vector_of<T>::type{}) {}
  LAMINA_ALWAYS_INLINE explicit simd(typename vector_of<T>::type vector) : data(vector) {}

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

/// How many operands are loaded, looked at and written together, of `Most` elements: four registers, few enough for every
/// machine, or, where V is one element, all of them, a group for the compiler to vectorise.
template <class V, class T, std::size_t Most>
inline constexpr std::size_t group_of = std::same_as<V, T> ? Most
                                                           : std::min<std::size_t>(4, Most / width<V, T>);

/// Calls body(0) to body(Count - 1). Written out where V is a register, since g++ -O2 leaves such a loop a loop, and its
/// registers in memory; a loop where V is one element, which that vectorises.
/// docs/decisions/0012-loops-at-o2-and-halves.md has what both cost.
template <class V, std::size_t Count, class Body>
LAMINA_ALWAYS_INLINE void repeat(const Body& body) {
  if constexpr (is_register<V>) {
    [&]<std::size_t... Index>(std::index_sequence<Index...>) LAMINA_INLINED_LAMBDA {
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
  [&]<std::size_t... Index>(std::index_sequence<Index...>) LAMINA_INLINED_LAMBDA {
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
    repeat<T, Count>([&](std::size_t i) LAMINA_INLINED_LAMBDA { asm volatile("" : "+v"(values[i].data)); });
#elif defined(__SSE2__)
    repeat<T, Count>([&](std::size_t i) LAMINA_INLINED_LAMBDA { asm volatile("" : "+x"(values[i].data)); });
#elif defined(__ARM_NEON)
    repeat<T, Count>([&](std::size_t i) LAMINA_INLINED_LAMBDA { asm volatile("" : "+w"(values[i].data)); });
#else
    asm volatile("" : "+m"(values));
#endif
  }
#endif
}

}  // namespace lamina::inline LAMINA_ABI::detail
