// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/cuda/detail/team.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"

/// What accumulating does to single elements, and to as many as move at once.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Elements that are loaded and stored at once: as many as 16 bytes of T hold.
template <class X, unsigned Count>
struct alignas(Count * sizeof(X)) unit {
  X at[Count];
};

/// Copies a unit of a gradient ahead; one by one where it is not aligned or ends. Beyond its end there are zeros, for the rest of
/// a unit of residual.
LAMINA_ANY_CALLER template <unsigned Count, class Team, class G>
LAMINA_HOST_DEVICE void copy_unit(const Team& team, std::byte* to, const G* from, unsigned rest) {
  constexpr auto bytes = static_cast<unsigned>(sizeof(unit<G, Count>));
  if (rest >= Count && reinterpret_cast<std::uintptr_t>(from) % bytes == 0) {
    team.template copy_ahead<bytes>(to, from);
    return;
  }
  for (unsigned k = 0; k < Count; ++k) {
    G* const element = reinterpret_cast<G*>(to) + k;
    if (k >= rest) {
      *element = G{};
    } else if constexpr (sizeof(G) >= 4) {
      team.template copy_ahead<static_cast<unsigned>(sizeof(G))>(element, from + k);
    } else {
      *element = from[k];
    }
  }
}

template <class T, unsigned Count>
LAMINA_HOST_DEVICE void store(T* to, const unit<T, Count>& elements) {
#if defined(__CUDA_ARCH__)
  // nvcc 13 takes an assignment apart and stores each element, of a vector too.
  __stwb(reinterpret_cast<uint4*>(to), __builtin_bit_cast(uint4, elements));
#else
  *reinterpret_cast<unit<T, Count>*>(to) = elements;
#endif
}

/// before + addend, or `before` if that is not finite.
template <class T>
LAMINA_HOST_DEVICE T added(T before, T addend, unsigned& left_out) {
  const T after = before + addend;
  if (is_finite(after)) return after;
  ++left_out;
  return before;
}

/// With momentum correction: u <- m·u + g, a <- a + u for the first piece of a step; u <- u + g, a <- a + g for others,
/// whose momentum is 1. An element whose a or u would not be finite is left out of both.
template <class T>
LAMINA_HOST_DEVICE T corrected(T before, T gradient, T& moving, T momentum, unsigned& left_out) {
  const T moved = product(momentum, moving) + gradient;
  const T after = before + (momentum < T(1) ? moved : gradient);
  if (is_finite(after) && is_finite(moved)) {
    moving = moved;
    return after;
  }
  ++left_out;
  return before;
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
