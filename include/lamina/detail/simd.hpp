// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <utility>

#include "lamina/detail/abi.hpp"

#if !defined(LAMINA_NO_XSIMD) && __has_include(<xsimd/xsimd.hpp>)
#include <xsimd/xsimd.hpp>
#ifdef XSIMD_NO_SUPPORTED_ARCHITECTURE  // it knows no instruction set of this machine
#define LAMINA_HAS_XSIMD 0
#else
#define LAMINA_HAS_XSIMD 1
#endif
#else
#define LAMINA_HAS_XSIMD 0
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

template <class V, class T>
inline constexpr std::size_t width = sizeof(V) / sizeof(T);

template <class V, class T>
LAMINA_ALWAYS_INLINE V load(const T* from) {
  if constexpr (std::same_as<V, T>) {
    return *from;
  } else {
    return V::load_unaligned(from);
  }
}

template <class V, class T>
LAMINA_ALWAYS_INLINE void store(T* to, const V& value) {
  if constexpr (std::same_as<V, T>) {
    *to = value;
  } else {
    value.store_unaligned(to);
  }
}

template <class V>
inline constexpr bool is_register = false;
#if LAMINA_HAS_XSIMD
template <class T, class A>
inline constexpr bool is_register<xsimd::batch<T, A>> = true;
#endif

#if LAMINA_HAS_XSIMD
template <class T>
using native_register = xsimd::batch<T>;
#else
template <class T>
using native_register = T;
#endif

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
