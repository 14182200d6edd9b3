// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
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
  /// Looked at block by block within the one pass. A block of 4,096 elements that holds such a number is left out and
  /// counted in left_out_elements(); the rest of the layer is added. For training that would rather lose a block than
  /// wait.
  each_block,
};

struct residual_options {
  finite_check check = finite_check::whole_layer;
  /// Momentum correction: u <- m·u + g, a <- a + u, and u is cleared with what is sent. 0: off, and no memory for u.
  /// Source: Lin et al., Deep Gradient Compression (ICLR 2018), eq. 4 and 5, with momentum factor masking.
  double momentum = 0;
};

/// The residual a_l of every layer on one worker (the paper's "local cache"): what was computed and not sent yet.
///
/// Holds N elements of T in one flat buffer, zero at first; twice that with momentum. Different layers may be
/// accumulated from different threads at a time, one layer from one.
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
    if (options.check == finite_check::each_block) block_left_out_.resize(first_block_.back());
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
    return detail::visit_gradient<T>(gradient, [&](auto from) {
      model_.check_size(layer, from.size());
      return add(layer, from, representative, execution);
    });
  }

  /// Throws what accumulate would throw, and changes nothing.
  template <class G>
  void verify(std::size_t layer, std::span<const G> gradient) const {
    model_.check_size(layer, gradient.size());
    if (options_.check == finite_check::whole_layer) bounds_after(layer, gradient, sequential{});
  }

  /// The residual of one layer: n_l elements, valid as long as this object. Throws std::out_of_range.
  std::span<const T> operator[](std::size_t layer) const {
    model_.check_layer(layer);
    return std::span(values_).subspan(model_.offset(layer), model_.sizes()[layer]);
  }

  /// a_l <- 0: what was in it has been sent. Throws std::out_of_range.
  void clear(std::size_t layer) {
    std::ranges::fill(mutable_layer(values_, layer), T(0));
    states_[layer].magnitude_bound = 0;
    states_[layer].is_clear = true;
    clear_velocity(layer);
  }

  /// a_l <- a_l − what the payload says: it was sent, and what rounding took away stays. Exact. `payload` is layer l as
  /// detail::encode_payload wrote it from this residual.
  void subtract(std::size_t layer, payload_type type, const std::byte* payload) {
    const std::span<T> to = mutable_layer(values_, layer);
    std::array<T, detail::block_elements> sent;
    for (std::size_t begin = 0; begin < to.size(); begin += sent.size()) {
      const auto rest = to.subspan(begin, std::min(sent.size(), to.size() - begin));
      detail::decode_payload<T>(type, payload, to.size(), begin, std::span(sent).first(rest.size()));
      for (std::size_t i = 0; i < rest.size(); ++i) rest[i] -= sent[i];
    }
    states_[layer].magnitude_bound = magnitude_of(to);
    clear_velocity(layer);
  }

  /// Elements left out so far by finite_check::each_block.
  std::size_t left_out_elements() const noexcept {
    std::size_t sum = 0;
    for (const layer_state& state : states_) sum += state.left_out_elements;
    return sum;
  }

  const layout& model() const noexcept { return model_; }
  const residual_options& options() const noexcept { return options_; }

  /// All of it, for saving: N elements in the order of the layout, and the velocity, N elements or none.
  std::span<const T> elements() const noexcept { return values_; }
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
      const T velocity_bound = velocity_.empty() ? T(0) : magnitude_of(mutable_layer(velocity_, l));
      states_[l] = {magnitude_of((*this)[l]), velocity_bound, 0, false};
    }
  }

 private:
  struct layer_state {
    T magnitude_bound = 0;  // no |a_i| of the layer is larger
    T velocity_bound = 0;   // no |u_i|
    std::size_t left_out_elements = 0;
    bool is_clear = true;
  };

  // One task of an execution: enough blocks to be worth handing to a thread.
  static constexpr std::size_t blocks_per_piece = 32;

  static std::size_t blocks_of(std::size_t elements) {
    return elements / detail::block_elements + (elements % detail::block_elements != 0);
  }

  std::span<T> mutable_layer(detail::aligned_vector<T>& buffer, std::size_t layer) {
    model_.check_layer(layer);
    return std::span(buffer).subspan(model_.offset(layer), model_.sizes()[layer]);
  }

  void clear_velocity(std::size_t layer) {
    if (velocity_.empty()) return;
    std::ranges::fill(mutable_layer(velocity_, layer), T(0));
    states_[layer].velocity_bound = 0;
  }

  template <class G, class Representative, class Execution>
  double add(std::size_t layer, std::span<const G> from, const Representative& representative,
             const Execution& execution) {
    layer_state& state = states_[layer];
    if (options_.check == finite_check::whole_layer) state = bounds_after(layer, from, execution);

    const bool skips = options_.check == finite_check::each_block;
    std::atomic<bool> small{true};
    for_each_block(layer, execution, [&](std::size_t block, std::size_t begin, std::size_t count) {
      const G* gradient = from.data() + begin;
      if (skips && !is_addable(layer, begin, gradient, count, small)) {
        block_left_out_[block] = count;
        const detail::read_only<T> kept{values_.data() + model_.offset(layer) + begin};
        block_totals_[block] = detail::block_total<T>(representative, count, kept);
      } else if (velocity_.empty()) {
        block_totals_[block] = add_block(layer, begin, gradient, count, representative);
      } else {
        block_totals_[block] = add_with_momentum(layer, begin, gradient, count, representative);
      }
    });

    state.is_clear = false;
    if (skips) {
      if (small) {
        raise_bounds(state);
      } else {
        state.magnitude_bound = magnitude_of((*this)[layer]);
        state.velocity_bound = velocity_.empty() ? T(0) : magnitude_of(mutable_layer(velocity_, layer));
      }
    }
    double total = 0;
    for (std::size_t block = first_block_[layer]; block < first_block_[layer + 1]; ++block) {
      total = representative.combine(total, block_totals_[block]);
      if (skips) state.left_out_elements += std::exchange(block_left_out_[block], 0);
    }
    return from.empty() ? 0.0 : representative.finish(total, from.size());
  }

  // Calls work(block, first element, elements) for each block of the layer.
  template <class Execution, class Work>
  void for_each_block(std::size_t layer, const Execution& execution, const Work& work) const {
    const std::size_t elements = model_.sizes()[layer];
    const std::size_t blocks = blocks_of(elements);
    const auto piece = [&](std::size_t index) {
      const std::size_t end = std::min(blocks, (index + 1) * blocks_per_piece);
      for (std::size_t k = index * blocks_per_piece; k < end; ++k) {
        const std::size_t begin = k * detail::block_elements;
        work(first_block_[layer] + k, begin, std::min(detail::block_elements, elements - begin));
      }
    };
    if (blocks <= blocks_per_piece) {
      if (blocks > 0) piece(0);
    } else {
      execution((blocks + blocks_per_piece - 1) / blocks_per_piece, piece);
    }
  }

  template <class G, class Representative>
  double add_block(std::size_t layer, std::size_t begin, const G* from, std::size_t count,
                   const Representative& representative) {
    T* to = values_.data() + model_.offset(layer) + begin;
    if (states_[layer].is_clear)
      return detail::block_total<T>(representative, count, detail::assign<T, G>{to, from});
    return detail::block_total<T>(representative, count, detail::add_and_write<T, G>{to, from});
  }

  template <class G, class Representative>
  double add_with_momentum(std::size_t layer, std::size_t begin, const G* from, std::size_t count,
                           const Representative& representative) {
    T* u = velocity_.data() + model_.offset(layer) + begin;
    std::array<T, detail::block_elements> updated;
    corrected(u, from, count, updated);
    std::copy_n(updated.begin(), count, u);
    return add_block(layer, begin, static_cast<const T*>(updated.data()), count, representative);
  }

  // Whether a block can be added without NaN, infinity or overflow. The sums are only looked at if the gradient is not
  // small, or if the residual has grown so far that small numbers might not do.
  template <class G>
  bool is_addable(std::size_t layer, std::size_t begin, const G* from, std::size_t count,
                  std::atomic<bool>& small) const {
    const layer_state& state = states_[layer];
    if (state.magnitude_bound < room && state.velocity_bound < room &&
        detail::all_small<T>(count, detail::read_only<T, G>{from})) {
      return true;
    }
    small = false;
    return detail::is_finite_magnitude(exact_bounds(layer, begin, from, count).magnitude_bound);
  }

  // m·u + g, the product rounded by itself on every machine.
  template <class G>
  void corrected(const T* u, const G* from, std::size_t count,
                 std::array<T, detail::block_elements>& updated) const {
    const T m = static_cast<T>(options_.momentum);
    for (std::size_t i = 0; i < count; ++i) updated[i] = m * u[i];
    detail::round_in_memory(updated);
    for (std::size_t i = 0; i < count; ++i) updated[i] += detail::load_as<T, T>(from + i);
  }

  // The bounds of the layer once the gradient is added; throws if it must not be. As long as the bounds leave room, no sum
  // can overflow and the sums need not be looked at; in the rare other case they are.
  template <class G, class Execution>
  layer_state bounds_after(std::size_t layer, std::span<const G> from, const Execution& execution) const {
    std::atomic<bool> small{true};
    for_each_block(layer, execution, [&](std::size_t, std::size_t begin, std::size_t count) {
      if (!detail::all_small<T>(count, detail::read_only<T, G>{from.data() + begin})) small = false;
    });
    layer_state after = states_[layer];
    if (small && after.magnitude_bound < room && after.velocity_bound < room) {
      raise_bounds(after);
      return after;
    }
    const layer_state exact = exact_bounds(layer, 0, from.data(), from.size());
    if (!detail::is_finite_magnitude(exact.magnitude_bound)) {
      const T gradient = detail::largest_magnitude<T>(from.size(), detail::read_only<T, G>{from.data()});
      throw non_finite_gradient(layer, model_[layer].name,
                                detail::is_finite_magnitude(gradient)
                                    ? "adding the gradient would overflow the residual"
                                    : "the gradient holds NaN or infinity");
    }
    after.magnitude_bound = exact.magnitude_bound;
    after.velocity_bound = exact.velocity_bound;
    return after;
  }

  // After a gradient of small magnitudes: |u| <= m·|u| + small, |a| <= |a| + |u|.
  void raise_bounds(layer_state& state) const {
    state.velocity_bound =
        static_cast<T>(options_.momentum) * state.velocity_bound + detail::small_magnitude<T>;
    state.magnitude_bound += state.velocity_bound;
  }

  // The bounds that adding these elements would lead to.
  template <class G>
  layer_state exact_bounds(std::size_t layer, std::size_t begin, const G* from, std::size_t count) const {
    layer_state exact;
    const std::size_t offset = model_.offset(layer) + begin;
    std::array<T, detail::block_elements> updated;
    for (std::size_t i = 0; i < count; i += updated.size()) {
      const std::size_t block = std::min(updated.size(), count - i);
      if (velocity_.empty()) {
        for (std::size_t k = 0; k < block; ++k) updated[k] = detail::load_as<T, T>(from + i + k);
      } else {
        corrected(velocity_.data() + offset + i, from + i, block, updated);
        exact.velocity_bound =
            detail::larger_magnitude(exact.velocity_bound, magnitude_of(std::span(updated).first(block)));
      }
      const T sum =
          detail::largest_magnitude<T>(block, detail::sum_of<T>{values_.data() + offset + i, updated.data()});
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
  detail::aligned_vector<T> values_;
  detail::aligned_vector<T> velocity_;  // empty without momentum
  std::vector<layer_state> states_;
  std::vector<std::size_t> first_block_;  // L + 1
  std::vector<double> block_totals_;
  std::vector<std::size_t> block_left_out_;  // elements of this pass, for finite_check::each_block
};

}  // namespace lamina
