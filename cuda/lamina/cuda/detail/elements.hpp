// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/half.hpp"
#include "lamina/reduction.hpp"

/// The elements of a row that one thread has, and how they move: on a GPU 16 bytes at a time, or 8 of halves.
namespace lamina::inline LAMINA_ABI::cuda::detail {

template <class X, unsigned Count>
struct alignas(Count * sizeof(X) < 16 ? Count * sizeof(X) : 16) unit {
  X at[Count];
};

/// The elements of a row of 64 that a thread of such a group has.
template <class X, class Group>
using unit_of = unit<X, static_cast<unsigned>(lanes) / Group::threads>;

/// Whether units of X can be loaded from there, or stored, as a whole.
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

/// Added to a number it changes no bit of it, not even the sign of a zero.
template <class G>
LAMINA_HOST_DEVICE G negative_zero() {
  if constexpr (lamina::half_element<G>) {
    return {0x8000};
  } else {
    return -G(0);
  }
}

/// The same where the memory is not aligned, or ends: of `count` elements, with negative zeros for the others.
template <class X, unsigned Count>
LAMINA_HOST_DEVICE unit<X, Count> load_each(const X* from, unsigned count) {
  unit<X, Count> to;
  for (unsigned k = 0; k < Count; ++k) to.at[k] = k < count ? from[k] : negative_zero<X>();
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

/// a <- a + g: before + gradient. Whether that is finite.
template <class T>
LAMINA_HOST_DEVICE bool add_gradient(T& residual, T gradient) {
  residual = residual + gradient;
  return is_finite(residual);
}

/// With momentum correction (Lin et al. 2018, eq. 4 and 5): u <- m u + g, a <- a + u for the first micro-batch gradient of a step;
/// u <- u + g, a <- a + g for others, whose momentum is 1. Whether both are finite.
template <class T>
LAMINA_HOST_DEVICE bool add_gradient(T& residual, T gradient, T& velocity, T momentum) {
  velocity = product(momentum, velocity) + gradient;
  residual = residual + (momentum < T(1) ? velocity : gradient);
  return is_finite(residual) && is_finite(velocity);
}

template <class T>
LAMINA_HOST_DEVICE void count_left_out(const model_view<T>& at, std::size_t layer, unsigned long long count) {
#if defined(__CUDA_ARCH__)
  atomicAdd(&at.state->left_out_elements, count);
  atomicAdd(&at.left_out[layer], count);
#else
  // Threads of Thrust's CPU systems run teams at the same time.
  __atomic_fetch_add(&at.state->left_out_elements, count, __ATOMIC_RELAXED);
  __atomic_fetch_add(&at.left_out[layer], count, __ATOMIC_RELAXED);
#endif
}

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
