// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/elementwise.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/reduce.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/options.hpp"
#include "lamina/reduction.hpp"
#include "lamina/residual/blocks.hpp"
#include "lamina/residual/memory.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// A gradient into a residual, one block at a time, each by any thread: of one call, in which the scale is the same.
template <element T>
class block_adder {
 public:
  using magnitude_bounds = typename residual_memory<T>::magnitude_bounds;

  block_adder(residual_memory<T>& memory, const layer_blocks& blocks, finite_check check, T scale)
      : memory_(memory), blocks_(blocks), check_(check), scale_(scale) {}

  struct result {
    double total;            // of the residual
    double fresh;            // of the gradient alone, if that was wanted
    std::uint16_t left_out;  // elements, by finite_check::each_element
  };
  /// Adds one block of a layer's gradient, and gives what its representative needs.
  template <class G, class Representative>
  result add(std::size_t layer, std::size_t block, std::span<const G> gradient,
             const Representative& representative, bool wants_fresh) const {
    const auto [begin, count] = blocks_.extent_of(layer, block);
    const std::size_t offset = memory_.model().offset(layer) + begin;
    const G* from = gradient.data() + begin;
    result sums{};
    if (memory_.has_velocity()) {
      sums = add_with_velocity(layer, offset, from, count, representative);
    } else if constexpr (chosen_at_run_time<Representative>) {
      // Of the common functor there is every loop. The others have those over elements of T alone, and what is widened or scaled
      // comes through a buffer: it costs a tenth to a fifth more, and half as much to compile.
      buffer_type buffer;
      sums = representative.is_common()
                 ? add_directly(layer, offset, from, count, typename Representative::common())
                 : add<T, false>(layer, offset, scaled(from, count, buffer), count, representative);
    } else {
      sums = add_directly(layer, offset, from, count, representative);
    }
    if (wants_fresh) {
      buffer_type buffer;
      sums.fresh = reduce_finite_block<T>(representative, scaled(from, count, buffer), count);
    }
    return sums;
  }

  /// Writes what add() would make of one block of the residual, and changes nothing.
  template <class G>
  void foresee(std::size_t layer, std::size_t block, std::span<const G> gradient, T* to) const {
    const auto [begin, count] = blocks_.extent_of(layer, block);
    const std::size_t offset = memory_.model().offset(layer) + begin;
    buffer_type buffer;
    buffer_type updated;
    const T* addend = scaled(gradient.data() + begin, count, buffer);
    bool is_finite = true;
    if (memory_.has_velocity()) {
      memory_.corrected(layer, offset, addend, count, updated);
      if (memory_.decays_next(layer)) addend = updated.data();
      is_finite = is_finite_magnitude(largest_magnitude<T>(count, read_only<T>(updated.data())));
    }
    const bool is_clear = memory_.is_clear(layer);
    const T* before = memory_.elements_at(offset);
    if (is_clear) {
      std::fill_n(to, count, T(0));
    } else {
      std::copy_n(before, count, to);
    }
    add_elements(to, addend, count);
    if (check_ != finite_check::each_element) return;
    if (is_finite && is_finite_magnitude(largest_magnitude<T>(count, read_only<T>(to)))) return;
    for (std::size_t i = 0; i < count; ++i) {
      const bool adds = all_finite<T>(std::array{to[i], memory_.has_velocity() ? updated[i] : T(0)});
      if (!adds) to[i] = is_clear ? T(0) : before[i];
    }
  }

  /// What finds elements that are not small: while the bounds leave room, no sum of small ones overflows.
  template <class G>
  screen<T, G> screen_for() const {
    return scale_ == T(1) ? screen<T, G>() : screen<T, G>(scale_);
  }

  struct exact_bounds {
    magnitude_bounds after;  // NaN or infinite if the gradient must not be added
    T gradient;              // its largest magnitude, without the scale
  };
  /// The bounds that adding this gradient would lead to, from the sums themselves.
  template <class G>
  exact_bounds bounds_after(std::size_t layer, std::span<const G> gradient) const {
    const std::span<const T> elements = memory_.layer(layer);
    exact_bounds bounds{};
    buffer_type buffer;
    buffer_type updated;
    for (std::size_t begin = 0; begin < gradient.size(); begin += buffer.size()) {
      const std::size_t count = (std::min)(buffer.size(), gradient.size() - begin);
      const T* addend = scaled(gradient.data() + begin, count, buffer);
      bounds.gradient = larger_magnitude(
          bounds.gradient, largest_magnitude<T>(count, read_only<T, G>(gradient.data() + begin)));
      if (memory_.has_velocity()) {
        memory_.corrected(layer, memory_.model().offset(layer) + begin, addend, count, updated);
        bounds.after.velocity = larger_magnitude(bounds.after.velocity,
                                                 largest_magnitude<T>(count, read_only<T>{updated.data()}));
        if (memory_.decays_next(layer)) addend = updated.data();
      }
      const T sum = largest_magnitude<T>(count, sum_of<T>{elements.data() + begin, addend});
      bounds.after.elements = larger_magnitude(bounds.after.elements, sum);
    }
    return bounds;
  }

 private:
  using buffer_type = std::array<T, block_elements>;

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

  template <class G, class Representative>
  result add_directly(std::size_t layer, std::size_t offset, const G* from, std::size_t count,
                      const Representative& representative) const {
    return scale_ == T(1) ? add<G, false>(layer, offset, from, count, representative)
                          : add<G, true>(layer, offset, from, count, representative);
  }

  // a <- a + g in one pass, with the look at the sums within it if they are to be looked at.
  template <class G, bool Scaled, class Representative>
  result add(std::size_t layer, std::size_t offset, const G* from, std::size_t count,
             const Representative& representative) const {
    T* to = memory_.elements_at(offset);
    const bool is_clear = memory_.is_clear(layer);
    const auto add_all = [&](auto refuses_bad) {
      constexpr bool refuses = decltype(refuses_bad)::value;
      return is_clear
                 ? reduce_block<T>(representative, count,
                                   assign_to<T, G, refuses, Scaled>{{to, from, scale_}})
                 : reduce_block<T>(representative, count, add_to<T, G, refuses, Scaled>{to, from, scale_});
    };
    if (check_ != finite_check::each_element) return {add_all(std::false_type()).total, 0, 0};
    const block_result taken = add_all(std::true_type());
    if (taken.taken == count) return {taken.total, 0, 0};

    const read_only<T, G, Scaled> addends(from, scale_);
    std::uint16_t left_out = 0;
    for (std::size_t i = taken.taken; i < count; ++i) {
      const T before = is_clear ? T(0) : to[i];
      const T sum = before + addends.at(i);
      const bool adds = all_finite<T>(std::array{sum});
      to[i] = adds ? sum : before;
      if (!adds) ++left_out;
    }
    return {reduce_block<T>(representative, count, read_only<T>(to)).total, 0, left_out};
  }

  // What is added is the new velocity for the first piece of a step's gradient, and the piece itself for those that follow. An
  // element that would not be finite in the residual or in the velocity is left out of both.
  template <class G, class Representative>
  result add_with_velocity(std::size_t layer, std::size_t offset, const G* from, std::size_t count,
                           const Representative& representative) const {
    buffer_type buffer;
    buffer_type updated;
    const T* piece = scaled(from, count, buffer);
    memory_.corrected(layer, offset, piece, count, updated);
    const T* addend = memory_.decays_next(layer) ? updated.data() : piece;
    T* to = memory_.elements_at(offset);
    T* velocity = memory_.velocity_at(offset);
    if (check_ != finite_check::each_element || all_add(layer, offset, addend, updated, count)) {
      std::copy_n(updated.data(), count, velocity);
      const block_result taken =
          memory_.is_clear(layer)
              ? reduce_block<T>(representative, count, assign_to<T, T, false>{{to, addend}})
              : reduce_block<T>(representative, count, add_to<T, T, false>{to, addend});
      return {taken.total, 0, 0};
    }
    std::uint16_t left_out = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const T before = memory_.is_clear(layer) ? T(0) : to[i];
      const T sum = before + addend[i];
      const bool adds = all_finite<T>(std::array{sum, updated[i]});
      to[i] = adds ? sum : before;
      if (adds) {
        velocity[i] = updated[i];
      } else {
        if (memory_.is_velocity_clear(layer)) velocity[i] = T(0);
        ++left_out;
      }
    }
    return {reduce_block<T>(representative, count, read_only<T>(to)).total, 0, left_out};
  }

  // Whether no element of a block is to be left out. From cache: the block was read a moment ago.
  bool all_add(std::size_t layer, std::size_t offset, const T* addend, const buffer_type& updated,
               std::size_t count) const {
    const T sum = memory_.is_clear(layer)
                      ? largest_magnitude<T>(count, read_only<T>(addend))
                      : largest_magnitude<T>(count, sum_of<T>{memory_.elements_at(offset), addend});
    return is_finite_magnitude(
        larger_magnitude(sum, largest_magnitude<T>(count, read_only<T>(updated.data()))));
  }

  residual_memory<T>& memory_;
  const layer_blocks& blocks_;
  finite_check check_;
  T scale_;
};

}  // namespace lamina::inline LAMINA_ABI::detail
