// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/half.hpp"
#include "lamina/payload.hpp"
#include "lamina/representative.hpp"

/// LAMINA_CALLED stands before what is too long for a copy at each of its calls.
/// LAMINA_UNROLLED stands before a loop over an array that is to stay in a GPU's registers: where nvcc leaves the loop, it puts the
/// array into memory.
#if defined(__CUDACC__)
#define LAMINA_CALLED __noinline__
#define LAMINA_UNROLLED _Pragma("unroll")
#else
#define LAMINA_CALLED
#define LAMINA_UNROLLED
#endif

/// The elements of a row of 64 that one thread has: how they move, on a GPU 16 bytes at a time, or 8 of halves; what is computed of
/// them, bitwise the same wherever it is compiled, since no product is fused with a sum; and how they are written in each payload.
namespace lamina::inline LAMINA_ABI::cuda::detail {

using lamina::detail::lanes;

/// A value as memory would round it; on the device the sums that follow do not fuse (see lamina::detail::sum).
template <class T>
LAMINA_HOST_DEVICE T rounded(T value) {
#if !defined(__CUDA_ARCH__)
  return lamina::detail::rounded(value);
#else
  return value;
#endif
}

template <class T>
LAMINA_HOST_DEVICE T product(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 4)
    return __fmul_rn(a, b);
  else
    return __dmul_rn(a, b);
#else
  return rounded(a * b);
#endif
}

template <class T>
LAMINA_HOST_DEVICE bool is_finite(T x) {
#if defined(__CUDA_ARCH__)
  // Not of NaN; of the magnitude, which the value needs as well.
  return std::abs(x) <= (std::numeric_limits<T>::max)();
#else
  return lamina::detail::is_finite(static_cast<double>(x));
#endif
}

/// A number of the gradient as a T.
template <class T, class G>
LAMINA_HOST_DEVICE T widened(G from) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<G, lamina::float16>) {  // the same number, by one instruction
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(from.bits));
    return static_cast<T>(number);
  }
#endif
  if constexpr (lamina::half_element<G>)
    return static_cast<T>(to_float(from));
  else
    return from;
}

template <class X, unsigned Count>
struct alignas(Count * sizeof(X) < 16 ? Count * sizeof(X) : 16) unit {
  X at[Count];
};

/// The elements of a row of 64 that a thread of such a group has.
template <class X, class Group>
using unit_of = unit<X, static_cast<unsigned>(lanes) / Group::threads>;

template <class Unit>
LAMINA_HOST_DEVICE bool is_aligned(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory) % alignof(Unit) == 0;
}

/// Loads a unit of what is read once; `from` is aligned to it.
template <class X, unsigned Count>
LAMINA_HOST_DEVICE unit<X, Count> load(const X* from) {
  unit<X, Count> to;
#if defined(__CUDA_ARCH__)
  // Of each type by itself, since moves between registers of different types are instructions.
  if constexpr (sizeof(X) == 4) {
    for (unsigned k = 0; k < Count; k += 4)
      asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(to.at[k]), "=f"(to.at[k + 1]), "=f"(to.at[k + 2]), "=f"(to.at[k + 3])
                   : "l"(from + k));
  } else if constexpr (sizeof(X) == 8) {
    for (unsigned k = 0; k < Count; k += 2)
      asm volatile("ld.global.L1::no_allocate.v2.f64 {%0, %1}, [%2];"
                   : "=d"(to.at[k]), "=d"(to.at[k + 1])
                   : "l"(from + k));
  } else {
    for (unsigned k = 0; k < Count; k += 4)
      asm volatile("ld.global.L1::no_allocate.v4.u16 {%0, %1, %2, %3}, [%4];"
                   : "=h"(to.at[k].bits), "=h"(to.at[k + 1].bits), "=h"(to.at[k + 2].bits),
                     "=h"(to.at[k + 3].bits)
                   : "l"(from + k));
  }
#else
  for (unsigned k = 0; k < Count; ++k) to.at[k] = from[k];
#endif
  return to;
}

/// The same where the memory is not aligned, or ends: of `count` elements. The others are -0, which added to a number changes no bit.
template <class X, unsigned Count>
LAMINA_HOST_DEVICE unit<X, Count> load_each(const X* from, unsigned count) {
  unit<X, Count> to;
  X zero{0x8000};
  if constexpr (!lamina::half_element<X>) zero = -X(0);
  for (unsigned k = 0; k < Count; ++k) to.at[k] = k < count ? from[k] : zero;
  return to;
}

/// Stores a unit; `to` is aligned to it.
template <class X, unsigned Count>
LAMINA_HOST_DEVICE void store(X* to, const unit<X, Count>& elements) {
#if defined(__CUDA_ARCH__)
  // nvcc 13 takes an assignment apart and stores each element, of a vector too.
  if constexpr (std::is_same_v<X, float>) {
    for (unsigned k = 0; k < Count; k += 4)
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + k), "f"(elements.at[k]),
                   "f"(elements.at[k + 1]), "f"(elements.at[k + 2]), "f"(elements.at[k + 3])
                   : "memory");
  } else if constexpr (std::is_same_v<X, double>) {
    for (unsigned k = 0; k < Count; k += 2)
      asm volatile("st.global.v2.f64 [%0], {%1, %2};" ::"l"(to + k), "d"(elements.at[k]),
                   "d"(elements.at[k + 1])
                   : "memory");
  } else if constexpr (sizeof elements == 8) {
    *reinterpret_cast<uint2*>(to) = __builtin_bit_cast(uint2, elements);
  } else if constexpr (sizeof elements == 4) {
    *reinterpret_cast<std::uint32_t*>(to) = __builtin_bit_cast(std::uint32_t, elements);
  } else {
    *reinterpret_cast<unit<X, Count>*>(to) = elements;
  }
#else
  for (unsigned k = 0; k < Count; ++k) to[k] = elements.at[k];
#endif
}

/// Stores the first `count` elements; as a whole where the memory is aligned.
template <class X, unsigned Count>
LAMINA_HOST_DEVICE void store_some(X* to, const unit<X, Count>& elements, unsigned count) {
  if (count >= Count && is_aligned<unit<X, Count>>(to)) return store(to, elements);
  for (unsigned k = 0; k < Count; ++k) {
    if (k < count) to[k] = elements.at[k];
  }
}

/// Calls visit(unit, first, count) for a group's rows of [begin, end) of a block, where begin is a multiple of 64: the thread's elements
/// of each row, of which `count` lie before the end. Some rows are on their way at a time. All units are aligned, where that is said.
LAMINA_ANY_CALLER template <class Group, class X, class Visit>
LAMINA_HOST_DEVICE void for_each_row(const Group& group, const X* block, bool are_aligned, unsigned begin,
                                     unsigned end, const Visit& visit) {
  constexpr auto row = static_cast<unsigned>(lanes);
  constexpr unsigned each = row / Group::threads;
  constexpr unsigned at_once = Group::threads == 1 ? 1 : 32 / static_cast<unsigned>(sizeof(X));
  const unsigned own = group.thread() * each;
  for (; begin + at_once * row <= end; begin += at_once * row) {
    unit<X, each> rows[at_once];
    LAMINA_UNROLLED for (unsigned r = 0; r < at_once; ++r) {
      const X* const from = block + begin + r * row + own;
      rows[r] = are_aligned ? load<X, each>(from) : load_each<X, each>(from, each);
    }
    LAMINA_UNROLLED for (unsigned r = 0; r < at_once; ++r) visit(rows[r], begin + r * row + own, each);
  }
  for (; begin < end; begin += row) {
    const unsigned first = begin + own;
    const unsigned rest = first < end ? end - first : 0;
    const unsigned count = rest < each ? rest : each;
    visit(count == each && are_aligned ? load<X, each>(block + first)
                                       : load_each<X, each>(block + first, count),
          first, count);
  }
}

template <class T>
LAMINA_HOST_DEVICE T larger_magnitude(T largest, T element) {
  const T magnitude = element < 0 ? -element : element;
  return magnitude > largest ? magnitude : largest;
}

/// The scale of a row, of which each thread of a group has some elements, and zeros beyond the last. All of the group calls it.
LAMINA_ANY_CALLER template <class Group, class T, unsigned Each>
LAMINA_HOST_DEVICE std::uint8_t scale_of_row(const Group& group, payload_type type,
                                             const unit<T, Each>& own) {
  static_assert(payload_block_elements == lanes);
  T largest = 0;
  for (unsigned k = 0; k < Each; ++k) largest = larger_magnitude(largest, own.at[k]);
  for (unsigned distance = Group::threads / 2; distance > 0; distance /= 2)
    largest = larger_magnitude(largest, group.across(largest, distance));
  return type == payload_type::int4 ? lamina::detail::block_scale<T, payload_type::int4>(largest)
                                    : lamina::detail::block_scale<T, payload_type::int8>(largest);
}

/// The integer that is written of an element, whose block has this scale.
template <class T>
LAMINA_HOST_DEVICE std::int8_t integer_of(T element, payload_type type, std::uint8_t scale_byte) {
  const T inverse = T(1) / lamina::detail::scale_value<T>(scale_byte);
  return type == payload_type::int4 ? lamina::detail::to_integer<T, payload_type::int4>(element, inverse)
                                    : lamina::detail::to_integer<T, payload_type::int8>(element, inverse);
}

/// An element as the receiver decodes it.
template <class T>
LAMINA_HOST_DEVICE T decoded(T element, payload_type type, std::uint8_t scale_byte) {
  switch (type) {
    case payload_type::float16:
      return to_float(lamina::detail::to_half<lamina::float16>(element));
    case payload_type::bfloat16:
      return to_float(lamina::detail::to_half<lamina::bfloat16>(element));
    case payload_type::int8:
    case payload_type::int4:
      return static_cast<T>(integer_of(element, type, scale_byte)) *
             lamina::detail::scale_value<T>(scale_byte);
    default:
      return element;
  }
}

/// Leaves of a block of the residual what rounding took away, by all of a group; beyond the last element of a row there are zeros.
LAMINA_ANY_CALLER template <class Group, class T>
LAMINA_HOST_DEVICE LAMINA_CALLED void subtract_sent(const Group& group, payload_type type, T* block,
                                                    unsigned count) {
  constexpr auto row = static_cast<unsigned>(lanes);
  constexpr unsigned each = row / Group::threads;
  for (unsigned first = group.thread() * each; first < (count + row - 1) / row * row; first += row) {
    auto own = load<T, each>(block + first);
    const std::uint8_t scale = has_blocks(type) ? scale_of_row(group, type, own) : std::uint8_t{0};
    for (unsigned k = 0; k < each; ++k) {
      const T sent = decoded(own.at[k], type, scale);
      own.at[k] = is_finite(sent) ? own.at[k] - sent : T(0);
    }
    store(block + first, own);
  }
}

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
