// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/elementwise.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/reduce.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/options.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual/blocks.hpp"
#include "lamina/residual/memory.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// No more than the sum of the magnitudes of a block, nor much less, and the same on every instruction set. Totals of magnitudes and of
/// squares tell it. For other functors the first quarter of the block is read once more, from cache, or all where that is zero.
template <class T, class F>
double magnitudes_of(const F& functor, double total, const T* elements, std::size_t count) {
  if constexpr (chosen_at_run_time<F>) {
    return functor.visit([&](const auto& each) { return magnitudes_of(each, total, elements, count); });
  } else if constexpr (requires { F::least_magnitudes(total); }) {
    const double magnitudes = F::least_magnitudes(total);
    if (is_finite(magnitudes)) return magnitudes;
  }
  const auto sum_of_first = [&](std::size_t some) {
    return reduce_block<T>(sum_of_magnitudes(), some, read_only<T>(elements)).total;
  };
  const double sum = sum_of_first((count + 3) / 4);
  return sum > 0 ? sum : sum_of_first(count);
}

/// A sum of this magnitude or a larger one is not written before all gradients of the call are known to be finite. Adding g to a and
/// subtracting it again changes a by at most 2^-23 |a + g| in float, hence by at most 2^-12 of the block's mean magnitude.
template <class T>
T limit_of(double magnitudes, std::size_t count) {
  constexpr double most = static_cast<double>((std::numeric_limits<T>::max)()) / 2;
  const double limit = magnitudes / static_cast<double>(count) * 2048;
  return static_cast<T>(limit < most ? limit : most);
}

/// Adds gradients to a residual, one block at a time, each in any thread. Serves one call, in which the scale is the same.
template <element T>
class block_adder {
 public:
  block_adder(residual_memory<T>& memory, const layer_blocks& blocks, T scale)
      : memory_(memory), blocks_(blocks), scale_(scale) {}

  struct result {
    double total;         // of the residual, once the whole block was added
    std::uint16_t taken;  // elements from the first on that were added
  };

  /// Adds a block up to the first element whose sum, or velocity, is not below `limit`.
  template <class G, class Representative>
  result add(std::size_t layer, std::size_t block, std::span<const G> gradient,
             const Representative& representative, T limit) const {
    const extent at = extent_of(layer, block);
    const G* from = gradient.data() + at.begin;
    result sums{};
    buffer_type buffer;
    const auto add_all = [&](const auto& functor) {
      return [&](const auto& source) { return add_below(functor, source, at.count); };
    };
    if (memory_.has_velocity()) {
      memory_.write_zeros(layer, at.offset, at.count);
      sums = with_velocity(layer, at, scaled(from, at.count, buffer), limit, add_all(representative));
    } else if constexpr (chosen_at_run_time<Representative>) {
      // Of the common functor there is every loop. The others have those over elements of T alone, and what is widened or scaled
      // comes through a buffer: it costs a tenth to a fifth more, and half as much to compile.
      sums = representative.is_common()
                 ? directly(layer, at, from, limit, add_all(typename Representative::common()))
                 : without_velocity<T, false>(layer, at, scaled(from, at.count, buffer), limit,
                                              add_all(representative));
    } else {
      sums = directly(layer, at, from, limit, add_all(representative));
    }
    return sums;
  }

  /// Adds the rest of a block of which the first elements were added, but for elements whose sum, or velocity, would not be finite;
  /// gives the block's total, and how many these are.
  template <class G, class Representative>
  std::pair<double, std::uint16_t> add_rest(std::size_t layer, std::size_t block, std::span<const G> gradient,
                                            std::size_t taken, const Representative& representative) const {
    const extent at = extent_of(layer, block);
    std::uint16_t left_out = 0;
    with_source(layer, at, gradient, [&](const auto& source) {
      for (std::size_t i = taken; i < at.count; ++i) {
        const std::array sum{source.at(i)};
        if (may_take<T>(sum, source.carry)) {
          source.put(i, sum[0]);
        } else {
          source.leave(i);
          ++left_out;
        }
      }
    });
    return {total_of(representative, at), left_out};
  }

  /// Whether the rest of a block, of which the first elements were added, leads to finite sums and velocities.
  template <class G>
  bool rest_is_finite(std::size_t layer, std::size_t block, std::span<const G> gradient,
                      std::size_t taken) const {
    const extent at = extent_of(layer, block);
    return with_source(layer, at, gradient, [&](const auto& source) {
      while (taken < at.count && may_take<T>(std::array{source.at(taken)}, source.carry)) ++taken;
      return taken == at.count;
    });
  }

  /// Subtracts the first elements of a block again, of a layer that was not clear; gives the sum of the magnitudes then.
  template <class G>
  double take_back(std::size_t layer, std::size_t block, std::span<const G> gradient,
                   std::size_t taken) const {
    const extent at = extent_of(layer, block);
    with_source(layer, at, gradient, [&](const auto& source) {
      for (std::size_t i = 0; i < taken; ++i) source.take_back(i);
    });
    return total_of(sum_of_magnitudes(), at);
  }

 private:
  using buffer_type = std::array<T, block_elements>;

  struct extent {
    std::size_t begin;   // in the layer
    std::size_t offset;  // among all elements
    std::size_t count;
  };
  extent extent_of(std::size_t layer, std::size_t block) const {
    const auto [begin, count] = blocks_.extent_of(layer, block);
    return {begin, memory_.model().offset(layer) + begin, count};
  }

  // The elements of a block as they are added: where they lie if they are T and stay as they are.
  template <class G>
  const T* scaled(const G* from, std::size_t count, buffer_type& buffer) const {
    if (scale_ != T(1)) {
      copy_elements(buffer.data(), count, read_only<T, G, true>(from, scale_));
    } else if constexpr (std::same_as<G, T>) {
      return from;
    } else {
      copy_elements(buffer.data(), count, read_only<T, G>(from));
    }
    return buffer.data();
  }

  // Each calls the visitor with the source of a block.
  template <class G, bool Scaled, class Visitor>
  auto without_velocity(std::size_t layer, const extent& at, const G* from, T limit,
                        const Visitor& visitor) const {
    T* to = memory_.elements_at(at.offset);
    const read_only<T, G, Scaled> gradient(from, scale_);
    return memory_.is_clear(layer) ? visitor(add_to<T, G, Scaled, true>{to, gradient, infinity_carry<T>})
                                   : visitor(add_to<T, G, Scaled, false>{to, gradient, carry_of(limit)});
  }
  template <class G, class Visitor>
  auto directly(std::size_t layer, const extent& at, const G* from, T limit, const Visitor& visitor) const {
    return scale_ == T(1) ? without_velocity<G, false>(layer, at, from, limit, visitor)
                          : without_velocity<G, true>(layer, at, from, limit, visitor);
  }
  template <class Visitor>
  auto with_velocity(std::size_t layer, const extent& at, const T* from, T limit,
                     const Visitor& visitor) const {
    T* to = memory_.elements_at(at.offset);
    T* velocity = memory_.velocity_at(at.offset);
    const pattern_of<T> carry = memory_.is_clear(layer) ? infinity_carry<T> : carry_of(limit);
    const read_only<T> gradient(from);
    return memory_.decays_next(layer)
               ? visitor(add_with_velocity<T, true>{to, velocity, gradient, memory_.momentum(), carry})
               : visitor(add_with_velocity<T, false>{to, velocity, gradient, memory_.momentum(), carry});
  }
  // Without a limit, for what is done to few blocks.
  template <class G, class Visitor>
  auto with_source(std::size_t layer, const extent& at, std::span<const G> gradient,
                   const Visitor& visitor) const {
    const G* from = gradient.data() + at.begin;
    constexpr T limit = std::numeric_limits<T>::infinity();
    if (!memory_.has_velocity()) return directly(layer, at, from, limit, visitor);
    buffer_type buffer;
    return with_velocity(layer, at, scaled(from, at.count, buffer), limit, visitor);
  }
  // Zeros are below every limit.
  static pattern_of<T> carry_of(T limit) {
    return carry_from((std::max)(std::bit_cast<pattern_of<T>>(limit), pattern_of<T>{1}));
  }

  template <class Representative, class Source>
  static result add_below(const Representative& representative, const Source& source, std::size_t count) {
    const block_result sums = reduce_block<T>(representative, count, source);
    std::size_t taken = sums.taken;
    if (taken < count) [[unlikely]] {
      // To the very element, so that what was added does not depend on the instruction set.
      for (std::array sum{source.at(taken)}; may_take<T>(sum, source.carry); sum = {source.at(taken)}) {
        source.put(taken, sum[0]);
        if (++taken == count) break;
      }
    }
    return {sums.total, static_cast<std::uint16_t>(taken)};
  }

  template <class Representative>
  double total_of(const Representative& representative, const extent& at) const {
    return reduce_block<T>(representative, at.count, read_only<T>(memory_.elements_at(at.offset))).total;
  }

  residual_memory<T>& memory_;
  const layer_blocks& blocks_;
  T scale_;
};

}  // namespace lamina::inline LAMINA_ABI::detail
