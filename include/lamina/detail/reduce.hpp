// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/simd.hpp"
#include "lamina/detail/sources.hpp"

/// The loop that touches every element, one block at a time, written once over an operand V that is either one element or a
/// SIMD register of them; both give the same bits (see reduction.hpp).
namespace lamina::inline LAMINA_ABI::detail {

template <class F, class V>
concept maps_to_itself = requires(const F& functor, const V& x) {
  { functor.map(x) } -> std::same_as<V>;
  { functor.combine(x, x) } -> std::same_as<V>;
};

/// Whole registers where the functor says that it takes them, one element otherwise.
template <class F, class T>
concept takes_registers = requires {
  typename F::is_simd;
}
&&maps_to_itself<F, native_register<T>>;
template <class F, class T>
using operand = std::conditional_t<takes_registers<F, T>, native_register<T>, T>;

/// A map without a product, of which nothing can be fused with the sum.
template <class F>
concept maps_without_product = requires {
  typename F::is_without_product;
};

/// What is combined of an operand. It may come with a velocity, which must be below the limit, too.
template <class V>
LAMINA_ALWAYS_INLINE const V& sum_of(const V& operand) {
  return operand;
}
template <class V>
LAMINA_ALWAYS_INLINE const V& sum_of(const corrected<V>& operand) {
  return operand.sum;
}
template <class T, class Operand, std::size_t Count>
LAMINA_ALWAYS_INLINE bool may_take(const std::array<Operand, Count>& operands, pattern_of<T> carry) {
  if constexpr (requires { operands[0].velocity; }) {
    using V = std::remove_cvref_t<decltype(operands[0].velocity)>;
    std::array<V, Count> sums;
    std::array<V, Count> velocities;
    repeat<V, Count>([&](std::size_t i) LAMINA_INLINED_LAMBDA {
      sums[i] = operands[i].sum;
      velocities[i] = operands[i].velocity;
    });
    return all_below<T>(sums, carry) && all_below<T>(velocities, carry);
  } else {
    return all_below<T>(operands, carry);
  }
}

/// What became of a block: its total, and how many operands were taken. Fewer than asked for: the source refuses one of the
/// next few; from there on nothing was written, and the total is of no use.
struct block_result {
  double total;
  std::size_t taken;
};

/// Combines `count` <= block_elements operands in the shared order.
template <class T, class V, class F, class Source>
block_result reduce_block_over(const F& functor, std::size_t count, const Source source) {
  using Lane = std::remove_cvref_t<decltype(functor.map(T{}))>;
  using Sum = std::conditional_t<std::same_as<V, T>, Lane, V>;
  constexpr std::size_t step = width<V, T>;
  constexpr std::size_t registers = lanes / step;
  static_assert(lanes % step == 0, "lamina: a register has more elements than a block has lanes");
  constexpr std::size_t group = group_of<V, T, lanes>;
  static_assert(registers % group == 0);
  // So many groups are written out together; more than sixteen registers went slower.
  constexpr std::size_t groups = is_register<V> ? std::min<std::size_t>(4, registers / group) : 1;
  static_assert(registers % (group * groups) == 0);
  std::array<Sum, registers> sums;
  sums.fill(Sum(0));

  const std::size_t whole = count - count % lanes;
  for (std::size_t i = 0; i < whole; i += lanes) {
    source.prefetch(i, lanes);
    // Takes the group that begins with register k; false if the source refuses it. Each is written after all of it is
    // loaded, which lets the loads start early.
    const auto take = [&](std::size_t k) LAMINA_INLINED_LAMBDA {
      std::array<decltype(source.template at<V>(0)), group> operands;
      repeat<V, group>([&](std::size_t r) LAMINA_INLINED_LAMBDA {
        operands[r] = source.template at<V>(i + (k + r) * step);
      });
      if constexpr (Source::refuses) {
        if (!may_take<T>(operands, source.carry)) [[unlikely]]
          return false;
      }
      if constexpr (Source::writes) {
        repeat<V, group>([&](std::size_t r)
                             LAMINA_INLINED_LAMBDA { source.put(i + (k + r) * step, operands[r]); });
      }
      std::array<Sum, group> mapped;
      repeat<V, group>([&](std::size_t r)
                           LAMINA_INLINED_LAMBDA { mapped[r] = functor.map(sum_of(operands[r])); });
      if constexpr (!maps_without_product<F>) round_by_itself(mapped);
      repeat<V, group>([&](std::size_t r)
                           LAMINA_INLINED_LAMBDA { sums[k + r] = functor.combine(sums[k + r], mapped[r]); });
      return true;
    };
    for (std::size_t k = 0; k < registers; k += group * groups) {
      std::size_t taken = k;
      const bool all = all_of_written_out<groups>([&](std::size_t index) LAMINA_INLINED_LAMBDA {
        taken = k + index * group;
        return take(taken);
      });
      if (!all) [[unlikely]]
        return {0, i + taken * step};
    }
  }

  std::array<Lane, lanes> lane;
  const auto to_lanes = [&](std::size_t first) {
    for (std::size_t r = 0; r < first; ++r) detail::store(lane.data() + r * step, sums[r]);
  };
  if (whole < count) {
    to_lanes(sums.size());
    for (std::size_t i = whole; i < count; ++i) {
      const std::array operand = {source.at(i)};
      if constexpr (Source::refuses) {
        if (!may_take<T>(operand, source.carry)) [[unlikely]]
          return {0, i};
      }
      if constexpr (Source::writes) source.put(i, operand[0]);
      std::array<Lane, 1> mapped = {functor.map(sum_of(operand[0]))};
      round_by_itself(mapped);
      lane[i - whole] = functor.combine(lane[i - whole], mapped[0]);
    }
    for (std::size_t r = 0; r < sums.size(); ++r) sums[r] = load<Sum>(lane.data() + r * step);
  }

  std::size_t half = lanes / 2;
  for (; half >= step; half /= 2) {
    for (std::size_t r = 0; r < half / step; ++r) sums[r] = functor.combine(sums[r], sums[r + half / step]);
  }
  to_lanes(1);
  for (; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lane[j] = functor.combine(lane[j], lane[j + half]);
  }
  return {static_cast<double>(lane[0]), count};
}

/// A functor that stands for one of several, which is chosen at run time: visit(visitor) calls the visitor with that one, and
/// is_common() tells whether it is the type `common`.
template <class F>
concept chosen_at_run_time = requires {
  typename F::is_chosen_at_run_time;
};

/// Over registers where the functor takes them, over elements otherwise. A choice made at run time is looked at once a block.
template <class T, class F, class Source>
block_result reduce_block(const F& functor, std::size_t count, const Source& source) {
  if constexpr (chosen_at_run_time<F>) {
    return functor.visit([&](const auto& chosen) { return reduce_block<T>(chosen, count, source); });
  } else {
    return reduce_block_over<T, operand<F, T>>(functor, count, source);
  }
}

}  // namespace lamina::inline LAMINA_ABI::detail
