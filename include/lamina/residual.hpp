// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "lamina/detail/gradient.hpp"
#include "lamina/detail/kernels.hpp"
#include "lamina/detail/layer_blocks.hpp"
#include "lamina/detail/residual_memory.hpp"
#include "lamina/error.hpp"
#include "lamina/execution.hpp"
#include "lamina/layout.hpp"
#include "lamina/payload.hpp"
#include "lamina/representative.hpp"
#include "lamina/tensor.hpp"

namespace lamina {

/// What happens to a gradient that holds NaN or infinity, or that would overflow the residual.
enum class finite_check {
  /// The layer is looked through first and refused whole: accumulate throws and the residual is as it was. The default;
  /// costs one more read of the gradient, mostly from cache.
  whole_layer,
  /// Looked at within the one pass, so that the check costs next to nothing. Elements that are not finite, or that would
  /// overflow, are left out and counted in left_out_elements(); the others are added. For training that would rather lose
  /// a few elements than a layer.
  each_element,
};

struct residual_options {
  finite_check check = finite_check::whole_layer;
  /// Momentum correction: u <- m·u + g, a <- a + u, and u is cleared with what is sent. 0: off, and no memory for u.
  /// Source: Lin et al., Deep Gradient Compression (ICLR 2018), eq. 4 and 5, with momentum factor masking.
  double momentum = 0;
};

/// The residual a_l of every layer on one worker (the paper's "local cache"): what was computed and not sent yet.
///
/// Holds N elements of T in one flat buffer, zero at first; twice that with momentum. Different layers may be used from
/// different threads at a time, one layer from one, also for reading: the zeros of a cleared layer are written when it is
/// looked at.
template <element T>
class residual_accumulator {
 public:
  /// Throws std::invalid_argument for a momentum outside [0, 1).
  explicit residual_accumulator(const layout& model, residual_options options = {})
      : options_(options),
        memory_(model, options.momentum),
        blocks_(model),
        bounds_after_(model.layers()),
        left_out_(model.layers()),
        block_totals_(blocks_.count()),
        block_notes_(blocks_.count()) {}

  /// a_l <- a_l + g_l (eq. 1 of the paper), and the representative value of the sum, in one pass.
  ///
  /// \param layer           index in the layout
  /// \param gradient        a tensor of n_l elements of T, lamina::float16 or lamina::bfloat16
  /// \param representative  the functor whose value is wanted
  /// \param execution       runs the blocks of the layer, sequentially unless told otherwise; see execution.hpp
  /// \return q_l after adding; 0 for an empty layer
  /// \throws std::out_of_range      no such layer
  /// \throws std::invalid_argument  the gradient has another size or, at run time, another element type
  /// \throws non_finite_gradient    with finite_check::whole_layer: it holds NaN or infinity, or a sum would overflow
  ///
  /// On any error the residual is as it was. Cost: see finite_check; a residual that is clear is written and not read.
  /// Deterministic: the same bits on every machine and with any number of threads.
  template <class Tensor, representative Representative = mean_abs, execution Execution = sequential>
  double accumulate(std::size_t layer, const Tensor& gradient, Representative representative = {},
                    const Execution& execution = {}) {
    model().check_layer(layer);
    double value = 0;
    detail::visit_gradient<T>(gradient, [&](auto from) {
      accumulate_layers(
          layer, layer + 1, [&](std::size_t, const auto& visitor) { visitor(from); }, std::span(&value, 1),
          representative, execution);
    });
    return value;
  }

  /// The same for the layers [first, last) at once: all of them are added or, on an error, none. Quicker than one by one
  /// where an execution starts threads, which it then does once.
  ///
  /// \param first, last     the layers, as a half-open range
  /// \param gradients       called with a layer and a visitor, calls visitor(std::span<const G>) with the gradient of
  ///                        that layer; more than once, and from several threads
  /// \param values          gets q_l of these layers
  /// \param representative  the functor whose values are wanted
  /// \param execution       runs pieces of up to 131,072 elements; if it throws itself, layers may be half added
  template <class Gradients, representative Representative = mean_abs, execution Execution = sequential>
  void accumulate_layers(std::size_t first, std::size_t last, const Gradients& gradients,
                         std::span<double> values, Representative representative = {},
                         const Execution& execution = {}) {
    if (first > last || last > model().layers()) {
      throw std::out_of_range("no layers [" + std::to_string(first) + ", " + std::to_string(last) +
                              ") among " + std::to_string(model().layers()));
    }
    for (std::size_t layer = first; layer < last; ++layer) {
      bool visited = false;
      gradients(layer, [&](auto from) {
        model().check_size(layer, from.size());
        visited = true;
      });
      if (!visited)
        throw std::invalid_argument("no gradient was given for layer '" + model()[layer].name + "'");
    }
    if (values.size() != last - first) {
      throw std::invalid_argument("there is room for " + std::to_string(values.size()) + " values of " +
                                  std::to_string(last - first) + " layers");
    }
    if (options_.check == finite_check::whole_layer) check_layers(first, last, gradients, execution);

    blocks_.for_each_run(first, last, execution, [&](std::size_t layer, std::size_t block, std::size_t end) {
      gradients(layer, [&](auto from) {
        for (; block < end; ++block) block_totals_[block] = add_block(layer, block, from, representative);
      });
    });

    for (std::size_t layer = first; layer < last; ++layer) {
      double total = 0;
      for (std::size_t block = blocks_.first(layer); block < blocks_.first(layer + 1); ++block) {
        total = representative.combine(total, block_totals_[block]);
        if (options_.check == finite_check::each_element) left_out_[layer] += block_notes_[block];
      }
      memory_.set_written(layer);
      const std::size_t elements = model().sizes()[layer];
      values[layer - first] = elements == 0 ? 0.0 : representative.finish(total, elements);
    }
  }

  /// The residual of one layer: n_l elements, valid as long as this object. Throws std::out_of_range.
  std::span<const T> operator[](std::size_t layer) const { return memory_.layer(layer); }

  /// a_l <- 0: what was in it has been sent. Throws std::out_of_range. Cost: O(1) without momentum, since the next
  /// gradient is written over what is there.
  void clear(std::size_t layer) { memory_.clear(layer); }

  /// a_l <- a_l − what the payload says: it was sent, and what rounding took away stays. Exact. `payload` is layer l as
  /// detail::encode_payload wrote it from this residual.
  void subtract(std::size_t layer, payload_type type, const std::byte* payload) {
    memory_.subtract(layer, type, payload);
  }

  /// Elements left out so far by finite_check::each_element.
  std::size_t left_out_elements() const noexcept {
    return std::accumulate(left_out_.begin(), left_out_.end(), std::size_t{0});
  }

  const layout& model() const noexcept { return memory_.model(); }
  const residual_options& options() const noexcept { return options_; }

  /// All of it, for saving: N elements in the order of the layout, and the velocity, N elements or none.
  std::span<const T> elements() const noexcept { return memory_.elements(); }
  std::span<const T> velocity() const noexcept { return memory_.velocity(); }
  /// Puts saved elements back. Throws std::invalid_argument, before anything is written, unless the sizes are those of
  /// elements() and velocity() and all numbers are finite.
  void restore(std::span<const T> elements, std::span<const T> velocity) {
    memory_.restore(elements, velocity);
  }

 private:
  using magnitude_bounds = typename detail::residual_memory<T>::magnitude_bounds;

  template <class G, class Representative>
  double add_block(std::size_t layer, std::size_t block, std::span<const G> gradient,
                   const Representative& representative) {
    const auto [begin, count] = blocks_.extent_of(layer, block);
    const G* from = gradient.data() + begin;
    const std::size_t offset = model().offset(layer) + begin;
    if (!memory_.has_velocity()) {
      return add_block(layer, block, offset, from, count, representative, nullptr);
    }
    std::array<T, detail::block_elements> updated;
    memory_.corrected(offset, from, count, updated);
    return add_block(layer, block, offset, static_cast<const T*>(updated.data()), count, representative,
                     memory_.velocity_at(offset));
  }

  // With momentum the gradient is the new velocity, which is kept in `velocity` for each element that is added.
  template <class G, class Representative>
  double add_block(std::size_t layer, std::size_t block, std::size_t offset, const G* from, std::size_t count,
                   const Representative& representative, T* velocity) {
    T* to = memory_.elements_at(offset);
    const bool is_clear = memory_.is_clear(layer);
    const auto add = [&](auto refuses_bad) {
      return is_clear ? detail::reduce_block<T, G>(representative, count,
                                                   detail::assign_to<T, G, refuses_bad()>{to, from})
                      : detail::reduce_block<T, G>(representative, count,
                                                   detail::add_to<T, G, refuses_bad()>{to, from});
    };
    const bool refuses = options_.check == finite_check::each_element;
    const auto [total, taken] = refuses ? add(std::true_type{}) : add(std::false_type{});
    if constexpr (std::same_as<G, T>) {
      if (velocity != nullptr) std::copy_n(from, taken, velocity);
    }
    if (refuses) block_notes_[block] = 0;
    if (taken == count) return total;

    for (std::size_t i = taken; i < count; ++i) {
      const T before = is_clear ? T(0) : to[i];
      const T addend = detail::load_as<T, T>(from + i);
      const T sum = before + addend;
      const bool adds = detail::all_finite<T>(std::array{sum});
      to[i] = adds ? sum : before;
      if (adds && velocity != nullptr) velocity[i] = addend;
      if (!adds) ++block_notes_[block];
    }
    return detail::reduce_block<T, T>(representative, count, detail::read_only<T>{to}).total;
  }

  // Throws, before anything changes, if one of the gradients must not be added; otherwise takes the bounds they lead to.
  // As long as the bounds leave room, no sum can overflow and the sums need not be looked at; in the rare other case
  // they are.
  template <class Gradients, class Execution>
  void check_layers(std::size_t first, std::size_t last, const Gradients& gradients,
                    const Execution& execution) {
    blocks_.for_each_run(first, last, execution, [&](std::size_t layer, std::size_t block, std::size_t end) {
      gradients(layer, [&]<class G>(std::span<const G> from) {
        for (; block < end; ++block) {
          const auto [begin, count] = blocks_.extent_of(layer, block);
          block_notes_[block] = !detail::all_small<T>(count, detail::read_only<T, G>{from.data() + begin});
        }
      });
    });
    for (std::size_t layer = first; layer < last; ++layer) {
      const auto notes = std::span(block_notes_)
                             .subspan(blocks_.first(layer), blocks_.first(layer + 1) - blocks_.first(layer));
      if (memory_.bounds(layer).leave_room() && std::ranges::count(notes, 0) == std::ssize(notes)) {
        bounds_after_[layer] = memory_.bounds_after_small(memory_.bounds(layer));
      } else {
        gradients(layer, [&](auto from) { bounds_after_[layer] = finite_bounds_after(layer, from); });
      }
    }
    for (std::size_t layer = first; layer < last; ++layer) memory_.set_bounds(layer, bounds_after_[layer]);
  }

  template <class G>
  magnitude_bounds finite_bounds_after(std::size_t layer, std::span<const G> gradient) const {
    const magnitude_bounds after = memory_.bounds_after(layer, gradient);
    if (!detail::is_finite_magnitude(after.elements)) {
      const T largest =
          detail::largest_magnitude<T>(gradient.size(), detail::read_only<T, G>{gradient.data()});
      throw non_finite_gradient(layer, model()[layer].name,
                                detail::is_finite_magnitude(largest)
                                    ? "adding the gradient would overflow the residual"
                                    : "the gradient holds NaN or infinity");
    }
    return after;
  }

  residual_options options_;
  detail::residual_memory<T> memory_;
  detail::layer_blocks blocks_;
  std::vector<magnitude_bounds> bounds_after_;  // while a check has not found the last of its layers good
  std::vector<std::size_t> left_out_;           // of each layer
  std::vector<double> block_totals_;
  // Of the pass under way: elements of a block that were left out; or 1 for a block that is not all small.
  std::vector<std::uint16_t> block_notes_;
};

}  // namespace lamina
