// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/simd.hpp"
#include "lamina/detail/sources.hpp"

/// Loops over elements that have no order of sums to keep: what they write is the same in any order. At g++ -O2 as quick as
/// at -O3, which a plain loop is not.
namespace lamina::inline LAMINA_ABI::detail {

/// to[i] <- operation(to[i], from[i]); the operation takes single elements and registers.
template <class T, class Operation>
LAMINA_ALWAYS_INLINE void combine_elements(T* to, const T* from, std::size_t count,
                                           const Operation& operation) {
  using V = native_register<T>;
  constexpr std::size_t step = width<V, T>;
  constexpr std::size_t group = group_of<V, T, lanes>;
  std::size_t i = 0;
  for (const std::size_t whole = count - count % (group * step); i < whole; i += group * step) {
    std::array<V, group> a;
    std::array<V, group> b;
    repeat<V, group>([&](std::size_t r) LAMINA_INLINED_LAMBDA {
      a[r] = load<V>(to + i + r * step);
      b[r] = load<V>(from + i + r * step);
    });
    repeat<V, group>([&](std::size_t r) LAMINA_INLINED_LAMBDA { a[r] = operation(a[r], b[r]); });
    repeat<V, group>([&](std::size_t r) LAMINA_INLINED_LAMBDA { detail::store(to + i + r * step, a[r]); });
  }
  for (; i < count; ++i) to[i] = operation(to[i], from[i]);
}

/// to[i] += from[i].
template <class T>
void add_elements(T* to, const T* from, std::size_t count) {
  combine_elements(to, from, count, [](const auto& a, const auto& b) LAMINA_INLINED_LAMBDA { return a + b; });
}

/// to[i] -= from[i].
template <class T>
void subtract_elements(T* to, const T* from, std::size_t count) {
  combine_elements(to, from, count, [](const auto& a, const auto& b) LAMINA_INLINED_LAMBDA { return a - b; });
}

/// a / b, rounded once. With -ffast-math a compiler would multiply by the reciprocal of a divisor that stays the same, or by an estimate
/// of it, which has other bits: where it has that, it is given the instruction, and elsewhere the divisor is hidden from it.
template <class V>
LAMINA_ALWAYS_INLINE V divided_by_itself(const V& a, const V& b) {
#if LAMINA_HAS_SIMD && defined(__SSE2__)
  if constexpr (is_register<V>) {
    V quotient = a;
    if constexpr (sizeof(typename V::value_type) == sizeof(float)) {
#if defined(__AVX512F__)
      asm("vdivps {%2, %1, %0|%0, %1, %2}" : "=v"(quotient.data) : "v"(a.data), "v"(b.data));
#elif defined(__AVX__)
      asm("vdivps {%2, %1, %0|%0, %1, %2}" : "=x"(quotient.data) : "x"(a.data), "x"(b.data));
#else
      asm("divps {%1, %0|%0, %1}" : "+x"(quotient.data) : "x"(b.data));
#endif
    } else {
#if defined(__AVX512F__)
      asm("vdivpd {%2, %1, %0|%0, %1, %2}" : "=v"(quotient.data) : "v"(a.data), "v"(b.data));
#elif defined(__AVX__)
      asm("vdivpd {%2, %1, %0|%0, %1, %2}" : "=x"(quotient.data) : "x"(a.data), "x"(b.data));
#else
      asm("divpd {%1, %0|%0, %1}" : "+x"(quotient.data) : "x"(b.data));
#endif
    }
    return quotient;
  }
#endif
  std::array<V, 1> by = {b};
  round_by_itself(by);
  return a / by[0];
}

/// to[i] /= divisor.
template <class T>
void divide_elements(T* to, T divisor, std::size_t count) {
  combine_elements(to, to, count, [divisor](const auto& a, const auto&) LAMINA_INLINED_LAMBDA {
    return divided_by_itself(a, std::remove_cvref_t<decltype(a)>(divisor));
  });
}

/// to[i] <- what the source has at i, its products rounded by themselves: a half-width type widened, a gradient times its
/// scale, or a velocity times the momentum. `to` may be where the source reads, but not overlap it otherwise.
template <class T, class Source>
void copy_elements(T* to, std::size_t count, const Source source) {
  using V = native_register<T>;
  constexpr std::size_t step = width<V, T>;
  constexpr std::size_t group = group_of<V, T, lanes>;
  std::size_t i = 0;
  for (const std::size_t whole = count - count % lanes; i < whole; i += lanes) {
    source.prefetch(i, lanes);
    for (std::size_t k = i; k < i + lanes; k += group * step) {
      std::array<V, group> operands;
      repeat<V, group>([&](std::size_t r)
                           LAMINA_INLINED_LAMBDA { operands[r] = source.template at<V>(k + r * step); });
      repeat<V, group>([&](std::size_t r)
                           LAMINA_INLINED_LAMBDA { detail::store(to + k + r * step, operands[r]); });
    }
  }
  for (; i < count; ++i) to[i] = source.at(i);
}

}  // namespace lamina::inline LAMINA_ABI::detail
