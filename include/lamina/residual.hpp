// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/detail/aligned_vector.hpp"
#include "lamina/detail/gradient.hpp"
#include "lamina/detail/kernels.hpp"
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
      : model_(model), options_(options), values_(model.elements()), states_(model.layers()) {
    if (!(options.momentum >= 0 && options.momentum < 1)) {
      throw std::invalid_argument("momentum must lie in [0, 1), got " + std::to_string(options.momentum));
    }
    if (options.momentum > 0) velocity_.resize(model.elements());
    first_block_.push_back(0);
    for (const std::size_t size : model.sizes())
      first_block_.push_back(first_block_.back() + blocks_of(size));
    block_totals_.resize(first_block_.back());
    block_notes_.resize(first_block_.back());
    states_after_.resize(model.layers());
  }

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
    model_.check_layer(layer);
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
    if (first > last || last > model_.layers()) {
      throw std::out_of_range("no layers [" + std::to_string(first) + ", " + std::to_string(last) +
                              ") among " + std::to_string(model_.layers()));
    }
    for (std::size_t layer = first; layer < last; ++layer) {
      bool visited = false;
      gradients(layer, [&](auto from) {
        model_.check_size(layer, from.size());
        visited = true;
      });
      if (!visited)
        throw std::invalid_argument("no gradient was given for layer '" + model_[layer].name + "'");
    }
    if (values.size() != last - first) {
      throw std::invalid_argument("there is room for " + std::to_string(values.size()) + " values of " +
                                  std::to_string(last - first) + " layers");
    }
    if (options_.check == finite_check::whole_layer) check_layers(first, last, gradients, execution);

    for_each_run(first, last, execution, [&](std::size_t layer, std::size_t block, std::size_t end) {
      gradients(layer, [&](auto from) {
        for (; block < end; ++block) block_totals_[block] = add_block(layer, block, from, representative);
      });
    });

    for (std::size_t layer = first; layer < last; ++layer) {
      double total = 0;
      for (std::size_t block = first_block_[layer]; block < first_block_[layer + 1]; ++block) {
        total = representative.combine(total, block_totals_[block]);
        if (options_.check == finite_check::each_element)
          states_[layer].left_out_elements += block_notes_[block];
      }
      states_[layer].is_clear = false;
      const std::size_t elements = model_.sizes()[layer];
      values[layer - first] = elements == 0 ? 0.0 : representative.finish(total, elements);
    }
  }

  /// The residual of one layer: n_l elements, valid as long as this object. Throws std::out_of_range.
  std::span<const T> operator[](std::size_t layer) const {
    write_zeros(layer);
    return layer_of(values_, layer);
  }

  /// a_l <- 0: what was in it has been sent. Throws std::out_of_range. Cost: O(1) without momentum, since the next
  /// gradient is written over what is there.
  void clear(std::size_t layer) {
    model_.check_layer(layer);
    states_[layer].magnitude_bound = 0;
    states_[layer].is_clear = true;
    states_[layer].holds_zeros = false;
    clear_velocity(layer);
  }

  /// a_l <- a_l − what the payload says: it was sent, and what rounding took away stays. Exact. `payload` is layer l as
  /// detail::encode_payload wrote it from this residual.
  void subtract(std::size_t layer, payload_type type, const std::byte* payload) {
    write_zeros(layer);
    const std::span<T> to = layer_of(values_, layer);
    std::array<T, detail::block_elements> sent;
    for (std::size_t begin = 0; begin < to.size(); begin += sent.size()) {
      const auto rest = to.subspan(begin, std::min(sent.size(), to.size() - begin));
      detail::decode_payload<T>(type, payload, to.size(), begin, std::span(sent).first(rest.size()));
      for (std::size_t i = 0; i < rest.size(); ++i) rest[i] -= sent[i];
    }
    states_[layer].magnitude_bound = magnitude_of(to);
    clear_velocity(layer);
  }

  /// Elements left out so far by finite_check::each_element.
  std::size_t left_out_elements() const noexcept {
    std::size_t sum = 0;
    for (const layer_state& state : states_) sum += state.left_out_elements;
    return sum;
  }

  const layout& model() const noexcept { return model_; }
  const residual_options& options() const noexcept { return options_; }

  /// All of it, for saving: N elements in the order of the layout, and the velocity, N elements or none.
  std::span<const T> elements() const noexcept {
    for (std::size_t l = 0; l < model_.layers(); ++l) write_zeros(l);
    return values_;
  }
  std::span<const T> velocity() const noexcept { return velocity_; }
  /// Puts saved elements back. Throws std::invalid_argument, before anything is written, unless the sizes are those of
  /// elements() and velocity() and all numbers are finite.
  void restore(std::span<const T> elements, std::span<const T> velocity) {
    if (elements.size() != values_.size() || velocity.size() != velocity_.size()) {
      throw std::invalid_argument("the saved residual has " + std::to_string(elements.size()) +
                                  " elements and " + std::to_string(velocity.size()) +
                                  " of velocity, where " + std::to_string(values_.size()) + " and " +
                                  std::to_string(velocity_.size()) + " belong");
    }
    for (const auto saved : {elements, velocity}) {
      if (!detail::is_finite_magnitude(magnitude_of(saved))) {
        throw std::invalid_argument("the saved residual holds NaN or infinity");
      }
    }
    std::ranges::copy(elements, values_.begin());
    std::ranges::copy(velocity, velocity_.begin());
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      const T velocity_bound = velocity_.empty() ? T(0) : magnitude_of(layer_of(velocity_, l));
      states_[l] = {.magnitude_bound = magnitude_of(layer_of(values_, l)),
                    .velocity_bound = velocity_bound,
                    .left_out_elements = states_[l].left_out_elements,
                    .is_clear = false};
    }
  }

 private:
  struct layer_state {
    T magnitude_bound = 0;  // no |a_i| of the layer is larger
    T velocity_bound = 0;   // no |u_i|
    std::size_t left_out_elements = 0;
    bool is_clear = true;
    bool holds_zeros = true;  // of a clear layer: whether its zeros were written
  };

  // One task of an execution: enough blocks to be worth handing to a thread.
  static constexpr std::size_t blocks_per_piece = 32;

  static std::size_t blocks_of(std::size_t elements) {
    return elements / detail::block_elements + (elements % detail::block_elements != 0);
  }

  std::span<T> layer_of(detail::aligned_vector<T>& buffer, std::size_t layer) const {
    return std::span(buffer).subspan(model_.offset(layer), model_.sizes()[layer]);
  }

  void write_zeros(std::size_t layer) const {
    model_.check_layer(layer);
    layer_state& state = states_[layer];
    if (!state.is_clear || state.holds_zeros) return;
    std::ranges::fill(layer_of(values_, layer), T(0));
    state.holds_zeros = true;
  }

  void clear_velocity(std::size_t layer) {
    if (velocity_.empty()) return;
    std::ranges::fill(layer_of(velocity_, layer), T(0));
    states_[layer].velocity_bound = 0;
  }

  // Cuts the blocks of layers [first, last) into pieces that cross layers, so that small layers share a piece and a large
  // one is shared. Calls work(layer, block, end) for each run of blocks of one layer.
  template <class Execution, class Work>
  void for_each_run(std::size_t first, std::size_t last, const Execution& execution, const Work& work) const {
    const auto bounds = std::span(first_block_).subspan(first, last - first + 1);
    const auto piece = [&](std::size_t index) {
      std::size_t block = bounds.front() + index * blocks_per_piece;
      const std::size_t stop = std::min(bounds.back(), block + blocks_per_piece);
      std::size_t layer =
          first + static_cast<std::size_t>(std::ranges::upper_bound(bounds, block) - bounds.begin()) - 1;
      for (; block < stop; ++layer) {
        const std::size_t end = std::min(stop, first_block_[layer + 1]);
        if (block < end) work(layer, block, end);
        block = end;
      }
    };
    const std::size_t blocks = bounds.back() - bounds.front();
    if (blocks <= blocks_per_piece) {
      if (blocks > 0) piece(0);
    } else {
      execution((blocks + blocks_per_piece - 1) / blocks_per_piece, piece);
    }
  }

  // Where a block begins in its layer, and its elements.
  std::pair<std::size_t, std::size_t> extent_of(std::size_t layer, std::size_t block) const {
    const std::size_t begin = (block - first_block_[layer]) * detail::block_elements;
    return {begin, std::min(detail::block_elements, model_.sizes()[layer] - begin)};
  }

  template <class G, class Representative>
  double add_block(std::size_t layer, std::size_t block, std::span<const G> gradient,
                   const Representative& representative) {
    const auto [begin, count] = extent_of(layer, block);
    const G* from = gradient.data() + begin;
    const std::size_t offset = model_.offset(layer) + begin;
    if (velocity_.empty()) return add_block(layer, block, offset, from, count, representative, nullptr);
    T* u = velocity_.data() + offset;
    std::array<T, detail::block_elements> updated;
    corrected(u, from, count, updated);
    return add_block(layer, block, offset, static_cast<const T*>(updated.data()), count, representative, u);
  }

  // With momentum the gradient is the new velocity, which is kept in `velocity` for each element that is added.
  template <class G, class Representative>
  double add_block(std::size_t layer, std::size_t block, std::size_t offset, const G* from, std::size_t count,
                   const Representative& representative, T* velocity) {
    T* to = values_.data() + offset;
    const auto add = [&]<bool Refuses>(std::bool_constant<Refuses>) {
      return states_[layer].is_clear
                 ? detail::reduce_block<T, G>(representative, count,
                                              detail::assign_to<T, G, Refuses>{to, from})
                 : detail::reduce_block<T, G>(representative, count, detail::add_to<T, G, Refuses>{to, from});
    };
    const bool refuses = options_.check == finite_check::each_element;
    const auto [total, taken] = refuses ? add(std::true_type{}) : add(std::false_type{});
    if constexpr (std::same_as<G, T>) {
      if (velocity != nullptr) std::copy_n(from, taken, velocity);
    }
    if (refuses) block_notes_[block] = 0;
    if (taken == count) return total;

    for (std::size_t i = taken; i < count; ++i) {
      const T before = states_[layer].is_clear ? T(0) : to[i];
      const T addend = detail::load_as<T, T>(from + i);
      const T sum = before + addend;
      const bool adds = detail::all_finite<T>(std::array{sum});
      to[i] = adds ? sum : before;
      if (adds && velocity != nullptr) velocity[i] = addend;
      if (!adds) ++block_notes_[block];
    }
    return detail::reduce_block<T, T>(representative, count, detail::read_only<T>{to}).total;
  }

  // m·u + g, the product rounded by itself on every machine.
  template <class G>
  void corrected(const T* u, const G* from, std::size_t count,
                 std::array<T, detail::block_elements>& updated) const {
    const T m = static_cast<T>(options_.momentum);
    for (std::size_t i = 0; i < count; ++i) updated[i] = m * u[i];
    detail::round_by_itself(updated);
    for (std::size_t i = 0; i < count; ++i) updated[i] += detail::load_as<T, T>(from + i);
  }

  // Throws, before anything changes, if one of the gradients must not be added; otherwise takes the bounds they lead to.
  // As long as the bounds leave room, no sum can overflow and the sums need not be looked at; in the rare other case
  // they are.
  template <class Gradients, class Execution>
  void check_layers(std::size_t first, std::size_t last, const Gradients& gradients,
                    const Execution& execution) {
    for_each_run(first, last, execution, [&](std::size_t layer, std::size_t block, std::size_t end) {
      gradients(layer, [&]<class G>(std::span<const G> from) {
        for (; block < end; ++block) {
          const auto [begin, count] = extent_of(layer, block);
          block_notes_[block] = !detail::all_small<T>(count, detail::read_only<T, G>{from.data() + begin});
        }
      });
    });
    for (std::size_t layer = first; layer < last; ++layer) {
      layer_state after = states_[layer];
      const auto notes =
          std::span(block_notes_).subspan(first_block_[layer], first_block_[layer + 1] - first_block_[layer]);
      if (after.magnitude_bound < room && after.velocity_bound < room &&
          std::ranges::count(notes, 0) == std::ssize(notes)) {
        raise_bounds(after);
      } else {
        gradients(layer, [&](auto from) { take_exact_bounds(layer, from, after); });
      }
      states_after_[layer] = after;
    }
    std::copy_n(states_after_.begin() + static_cast<std::ptrdiff_t>(first), last - first,
                states_.begin() + static_cast<std::ptrdiff_t>(first));
  }

  template <class G>
  void take_exact_bounds(std::size_t layer, std::span<const G> from, layer_state& after) const {
    const layer_state exact = exact_bounds(layer, from);
    if (!detail::is_finite_magnitude(exact.magnitude_bound)) {
      const T gradient = detail::largest_magnitude<T>(from.size(), detail::read_only<T, G>{from.data()});
      throw non_finite_gradient(layer, model_[layer].name,
                                detail::is_finite_magnitude(gradient)
                                    ? "adding the gradient would overflow the residual"
                                    : "the gradient holds NaN or infinity");
    }
    after.magnitude_bound = exact.magnitude_bound;
    after.velocity_bound = exact.velocity_bound;
  }

  // After a gradient of small magnitudes: |u| <= m·|u| + small, |a| <= |a| + |u|.
  void raise_bounds(layer_state& state) const {
    state.velocity_bound =
        static_cast<T>(options_.momentum) * state.velocity_bound + detail::small_magnitude<T>;
    state.magnitude_bound += state.velocity_bound;
  }

  // The bounds that adding this gradient would lead to.
  template <class G>
  layer_state exact_bounds(std::size_t layer, std::span<const G> from) const {
    write_zeros(layer);
    layer_state exact;
    const std::size_t offset = model_.offset(layer);
    std::array<T, detail::block_elements> updated;
    for (std::size_t i = 0; i < from.size(); i += updated.size()) {
      const std::size_t count = std::min(updated.size(), from.size() - i);
      if (velocity_.empty()) {
        for (std::size_t k = 0; k < count; ++k) updated[k] = detail::load_as<T, T>(from.data() + i + k);
      } else {
        corrected(velocity_.data() + offset + i, from.data() + i, count, updated);
        exact.velocity_bound =
            detail::larger_magnitude(exact.velocity_bound, magnitude_of(std::span(updated).first(count)));
      }
      const T sum =
          detail::largest_magnitude<T>(count, detail::sum_of<T>{values_.data() + offset + i, updated.data()});
      exact.magnitude_bound = detail::larger_magnitude(exact.magnitude_bound, sum);
    }
    return exact;
  }

  // What bounds may reach: a quarter of the range, so that rounding of sums and bounds, and one more gradient with its
  // velocity, still fit.
  static constexpr T room = std::numeric_limits<T>::max() / 4;

  static T magnitude_of(std::span<const T> elements) {
    return detail::largest_magnitude<T>(elements.size(), detail::read_only<T>{elements.data()});
  }

  layout model_;
  residual_options options_;
  mutable detail::aligned_vector<T> values_;  // const members write the zeros of a cleared layer
  detail::aligned_vector<T> velocity_;        // empty without momentum
  mutable std::vector<layer_state> states_;
  std::vector<layer_state> states_after_;  // while a check has not found the last of its layers good
  std::vector<std::size_t> first_block_;   // L + 1
  std::vector<double> block_totals_;
  // Of the pass under way: elements of a block that were left out; or 1 for a block that is not all small.
  std::vector<std::uint16_t> block_notes_;
};

}  // namespace lamina
