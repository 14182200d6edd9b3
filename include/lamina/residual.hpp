// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/reduce.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/error.hpp"
#include "lamina/execution.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual/add.hpp"
#include "lamina/residual/blocks.hpp"
#include "lamina/residual/gradient.hpp"
#include "lamina/residual/memory.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI {

namespace detail {
template <element, class>
struct worker_state;
}  // namespace detail

/// The residual a_l of every layer on one worker (the paper's "local cache"): what was computed and not sent yet.
///
/// Holds N elements of T in one flat buffer, zero at first; twice that with momentum. Memory is touched first by the threads
/// that add the first gradients. Different layers may be used from different threads at a time; const members may be called from
/// several threads at a time.
template <element T>
class residual_accumulator {
 public:
  /// Throws std::invalid_argument for a momentum outside [0, 1).
  explicit residual_accumulator(const layout& model, const residual_options& options = {})
      : options_(options),
        memory_(model, options),
        blocks_(model),
        is_given_(model.layers()),
        left_out_(model.layers()),
        block_totals_(blocks_.count()),
        limits_(blocks_.count()),
        block_notes_(blocks_.count()) {}

  /// The next gradient of each layer is the first of a step, for which the velocity decays; those that follow it are pieces
  /// of the same gradient. Without momentum nothing depends on it. Cost: O(L).
  void begin_step() noexcept { memory_.begin_step(); }

  /// a_l <- a_l + g_l (eq. 1 of the paper), and the representative value of the sum, in one pass.
  ///
  /// \param layer           index in the layout
  /// \param gradient        a tensor of n_l elements of T, lamina::float16 or lamina::bfloat16
  /// \param representative  the functor whose value is wanted
  /// \param execution       runs the blocks of the layer, sequentially unless told otherwise; see execution.hpp
  /// \param scale           multiplies each element, as a T, before it is added
  /// \return q_l after adding; 0 for an empty layer
  /// \throws std::out_of_range      no such layer
  /// \throws std::invalid_argument  the gradient has another size or, at run time, another element type; a scale that is not
  ///                                finite
  /// \throws non_finite_gradient    with non_finite::refuse: it holds NaN or infinity, or a sum would overflow
  ///
  /// On any of these errors the residual is as it was; after non_finite_gradient to within the rounding that non_finite::refuse says.
  /// A residual that is clear is written and not read.
  /// Deterministic: the same bits on every machine and with any number of threads.
  template <class Tensor, representative Representative = mean_abs, execution Execution = sequential>
  double accumulate(std::size_t layer, const Tensor& gradient, const Representative& representative = {},
                    const Execution& execution = {}, double scale = 1) {
    model().check_layer(layer);
    double value = 0;
    accumulate_layers(
        layer, layer + 1,
        [&](std::size_t, const auto& visitor) { detail::visit_gradient<T>(gradient, visitor); },
        std::span(&value, 1), representative, execution, scale);
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
  /// \param execution       runs pieces of the work; if it throws itself, what it has not run is run by the calling thread,
  ///                        all layers are added, and the exception goes on to the caller
  /// \param scale           multiplies each element, as a T, before it is added
  template <class Gradients, representative Representative = mean_abs, execution Execution = sequential>
  void accumulate_layers(std::size_t first, std::size_t last, const Gradients& gradients,
                         std::span<double> values, const Representative& representative = {},
                         const Execution& execution = {}, double scale = 1) {
    std::exception_ptr thrown;
    const std::optional<std::size_t> refused =
        try_add(first, last, gradients, values, representative, execution, scale, false, thrown);
    if (refused) raise_refused(*refused, gradients);
#if LAMINA_HAS_EXCEPTIONS
    if (thrown) std::rethrow_exception(thrown);
#endif
  }

  /// The residual of one layer: n_l elements, valid as long as this object. Throws std::out_of_range.
  [[nodiscard]] std::span<const T> operator[](std::size_t layer) const {
    return memory_.layer(layer);
  }

  /// a_l <- 0: what was in it has been sent. Throws std::out_of_range. Cost: O(1), since the next gradient is written over
  /// what is there.
  void clear(std::size_t layer) {
    memory_.clear(layer);
  }

  /// a_l <- a_l − what the payload says: it was sent, and what rounding took away stays. Exact. `payload` is layer l as it stands
  /// in a frame that was encoded from this residual.
  void subtract(std::size_t layer, payload_type type, const std::byte* payload) {
    memory_.subtract(layer, type, payload);
  }

  /// The same of elements [begin, end) alone, of which the receiver has got no others: those stay, and the layer is not clear.
  /// `payload` is the whole layer. Throws std::out_of_range unless there are such elements, and std::invalid_argument for an
  /// int8 or int4 payload whose range does not begin at a multiple of payload_block_elements. Cost: one write of the range.
  void clear(std::size_t layer, std::size_t begin, std::size_t end) {
    memory_.clear(layer, begin, end);
  }
  void subtract(std::size_t layer, payload_type type, const std::byte* payload, std::size_t begin,
                std::size_t end) {
    memory_.subtract(layer, type, payload, begin, end);
  }

  /// Whether the residual of a layer is zero because it was cleared, or is new. Throws std::out_of_range.
  [[nodiscard]] bool is_clear(std::size_t layer) const {
    model().check_layer(layer);
    return memory_.is_clear(layer);
  }

  /// Elements left out so far by non_finite::skip.
  [[nodiscard]] std::size_t left_out_elements() const noexcept {
    std::size_t all = 0;
    for (const std::size_t each : left_out_) all += each;
    return all;
  }

  [[nodiscard]] const layout& model() const noexcept {
    return memory_.model();
  }
  [[nodiscard]] const residual_options& options() const noexcept {
    return options_;
  }

  /// All of it, for saving: N elements in the order of the layout, and the velocity, N elements or none.
  [[nodiscard]] std::span<const T> elements() const {
    return memory_.elements();
  }
  [[nodiscard]] std::span<const T> velocity() const {
    return memory_.velocity();
  }
  [[nodiscard]] bool has_velocity() const noexcept {
    return memory_.has_velocity();
  }
  /// Puts saved elements back. Throws std::invalid_argument, before anything is written, unless the sizes are those of
  /// elements() and velocity() and all numbers are finite.
  void restore(std::span<const T> elements, std::span<const T> velocity) {
    memory_.restore(elements, velocity);
    for (std::size_t layer = 0; layer < model().layers(); ++layer) {
      for (std::size_t block = blocks_.first(layer); block < blocks_.first(layer + 1); ++block) {
        const auto [begin, count] = blocks_.extent_of(layer, block);
        const detail::read_only<T> from(memory_.layer(layer).data() + begin);
        set_limit(layer, block, detail::reduce_block<T>(detail::sum_of_magnitudes(), count, from).total);
      }
    }
  }

 private:
  template <element, class>
  friend struct detail::worker_state;

  using block_adder = detail::block_adder<T>;

  // What became of a pass that could be carried out.
  struct outcome {
    std::size_t refused;  // the first layer whose gradient must not be added, or the end of the range
    std::exception_ptr thrown = nullptr;  // by an execution
  };

  // accumulate_layers, which gives back the first layer whose gradient is refused; none of the call's gradients then is added.
  // What an execution threw comes back in `thrown`, once all is added. Layers may lack their gradient if that is said, and
  // then stay as they are.
  template <class Gradients, class Representative, class Execution>
  std::optional<std::size_t> try_add(std::size_t first, std::size_t last, const Gradients& gradients,
                                     std::span<double> values, const Representative& representative,
                                     const Execution& execution, double scale, bool may_lack_gradients,
                                     std::exception_ptr& thrown) {
    look_at(first, last, gradients, values, scale, may_lack_gradients);
    const outcome done = add_or_refuse(first, last, gradients, values, representative, execution, scale);
    if (done.refused < last) return done.refused;
    thrown = done.thrown;
    return std::nullopt;
  }
  // Whether the last call had a gradient for it.
  bool was_given(std::size_t layer) const noexcept {
    return is_given_[layer] != 0;
  }

  // Adds all gradients or, but for rounding, none. Of each block elements are added up to the first whose sum is not below the block's
  // limit, so that what is added does not depend on threads. What is left of such blocks is looked at before more of it is added.
  template <class Gradients, class Representative, class Execution>
  outcome add_or_refuse(std::size_t first, std::size_t last, const Gradients& gradients,
                        std::span<double> values, const Representative& representative,
                        const Execution& execution, double scale) {
    const block_adder adder(memory_, blocks_, static_cast<T>(scale));
    const bool skips = options_.non_finite == non_finite::skip;
    std::fill(block_notes_.begin() + static_cast<std::ptrdiff_t>(blocks_.first(first)),
              block_notes_.begin() + static_cast<std::ptrdiff_t>(blocks_.first(last)), not_added);
    outcome done{last};
    // Runs work(layer, block, elements, gradient) for the blocks of which is_due(note, elements) is true.
    const auto run = [&](const auto& is_due, const auto& work) {
      const std::exception_ptr thrown =
          run_all(first, last, execution, [&](std::size_t layer, std::size_t block, std::size_t end) {
            gradients(layer, [&](auto from) {
              for (; block < end; ++block) {
                const std::size_t count = blocks_.extent_of(layer, block).second;
                if (is_due(block_notes_[block], count)) work(layer, block, count, from);
              }
            });
          });
      if (thrown) done.thrown = thrown;
    };
    const auto set_total = [&](std::size_t layer, std::size_t block, double total) {
      block_totals_[block] = total;
      if (!skips) set_limit(layer, block, representative, total);
    };

    std::atomic<bool> has_rest = false;
    const auto is_not_added = [](std::size_t note, std::size_t) { return note == not_added; };
    run(is_not_added, [&](std::size_t layer, std::size_t block, std::size_t count, auto from) {
      const T limit = skips ? std::numeric_limits<T>::infinity() : limits_[block];
      auto sums = adder.add(layer, block, from, representative, limit);
      block_notes_[block] = skips ? std::uint16_t{0} : sums.taken;
      if (sums.taken < count && skips) {
        std::tie(sums.total, block_notes_[block]) =
            adder.add_rest(layer, block, from, sums.taken, representative);
      } else if (sums.taken < count) {
        has_rest.store(true, std::memory_order_relaxed);
        return;
      }
      set_total(layer, block, sums.total);
    });
    if (has_rest) {
      const auto is_in_part = [](std::size_t note, std::size_t count) { return note < count; };
      std::atomic<std::size_t> refused = last;
      run(is_in_part, [&](std::size_t layer, std::size_t block, std::size_t, auto from) {
        std::size_t lowest = refused;
        if (layer >= lowest || adder.rest_is_finite(layer, block, from, block_notes_[block])) return;
        while (layer < lowest && !refused.compare_exchange_weak(lowest, layer)) continue;
      });
      done.refused = refused;
      if (done.refused < last) {
        const auto has_some = [](std::size_t note, std::size_t) { return note != 0; };
        run(has_some, [&](std::size_t layer, std::size_t block, std::size_t, auto from) {
          const std::size_t taken = std::exchange(block_notes_[block], std::uint16_t{0});
          if (memory_.is_clear(layer)) return;
          set_limit(layer, block, adder.take_back(layer, block, from, taken));
        });
        for (std::size_t layer = first; layer < last; ++layer) {
          if (memory_.is_clear(layer)) memory_.clear(layer);  // its memory is anything again
        }
        return done;
      }
      run(is_in_part, [&](std::size_t layer, std::size_t block, std::size_t count, auto from) {
        const std::size_t taken = std::exchange(block_notes_[block], static_cast<std::uint16_t>(count));
        set_total(layer, block, adder.add_rest(layer, block, from, taken, representative).first);
      });
    }
    for (std::size_t layer = first; layer < last; ++layer) {
      if (is_given_[layer] != 0) finish(layer, values[layer - first], representative);
    }
    return done;
  }

  void set_limit(std::size_t layer, std::size_t block, double magnitudes) {
    limits_[block] = detail::limit_of<T>(magnitudes, blocks_.extent_of(layer, block).second);
  }
  template <class Representative>
  void set_limit(std::size_t layer, std::size_t block, const Representative& representative, double total) {
    const auto [begin, count] = blocks_.extent_of(layer, block);
    const T* elements = memory_.elements_at(model().offset(layer) + begin);
    set_limit(layer, block, detail::magnitudes_of<T>(representative, total, elements, count));
  }

  // Throws unless the call can be carried out: all that can be wrong but for numbers.
  template <class Gradients>
  void look_at(std::size_t first, std::size_t last, const Gradients& gradients, std::span<double> values,
               double scale, bool may_lack_gradients) {
    if (first > last || last > model().layers()) {
      detail::raise(std::out_of_range("no layers [" + std::to_string(first) + ", " + std::to_string(last) +
                                      ") among " + std::to_string(model().layers())));
    }
    if (values.size() != last - first) {
      detail::raise(std::invalid_argument("there is room for " + std::to_string(values.size()) +
                                          " values of " + std::to_string(last - first) + " layers"));
    }
    check_scale(scale);
    for (std::size_t layer = first; layer < last; ++layer) {
      is_given_[layer] = 0;
      gradients(layer, [&](auto from) {
        is_given_[layer] = 1;
        model().check_size(layer, from.size());
      });
      if (is_given_[layer] == 0 && !may_lack_gradients) {
        detail::raise(std::invalid_argument("no gradient was given for layer '" + model()[layer].name + "'"));
      }
    }
  }

  static void check_scale(double scale) {
    constexpr double most = (std::numeric_limits<T>::max)();
    if (detail::is_finite(scale) && -most <= scale && scale <= most &&
        (static_cast<T>(scale) != T(0) || scale == 0)) {
      return;
    }
    detail::raise(std::invalid_argument(
        "the scale of the gradients must be a finite number of their type, got " + std::to_string(scale)));
  }

  // Runs work(layer, block, end) over all blocks. What an execution that throws leaves behind the calling thread does.
  template <class Execution, class Work>
  std::exception_ptr run_all(std::size_t first, std::size_t last, const Execution& execution,
                             const Work& work) {
#if LAMINA_HAS_EXCEPTIONS
    try {
      blocks_.for_each_run(first, last, execution, work);
    } catch (...) {
      blocks_.for_each_run(first, last, sequential(), work);
      return std::current_exception();
    }
#else
    blocks_.for_each_run(first, last, execution, work);
#endif
    return nullptr;
  }

  template <class Representative>
  void finish(std::size_t layer, double& value, const Representative& representative) {
    const std::size_t begin = blocks_.first(layer);
    const std::size_t blocks = blocks_.first(layer + 1) - begin;
    if (options_.non_finite == non_finite::skip) {
      for (std::size_t block = begin; block < begin + blocks; ++block)
        left_out_[layer] += block_notes_[block];
    }
    memory_.set_written(layer);
    memory_.set_decayed(layer);
    value = detail::finished_value(representative, std::span(block_totals_).subspan(begin, blocks),
                                   model().sizes()[layer]);
  }

  template <class Gradients>
  void raise_refused(std::size_t layer, const Gradients& gradients) const {
    bool overflows = false;
    gradients(layer, [&]<class G>(std::span<const G> from) {
      overflows = detail::is_finite_magnitude(
          detail::largest_magnitude<T>(from.size(), detail::read_only<T, G>(from.data())));
    });
    detail::raise(non_finite_gradient(layer, layer, model()[layer].name,
                                      overflows ? "adding the gradient would overflow the residual"
                                                : "the gradient holds NaN or infinity"));
  }

  // In block_notes_: more than a block has elements.
  static constexpr std::uint16_t not_added = 0xffff;
  static_assert(detail::block_elements < not_added);

  residual_options options_;
  detail::residual_memory<T> memory_;
  detail::layer_blocks blocks_;
  std::vector<char> is_given_;         // of the call under way
  std::vector<std::size_t> left_out_;  // of each layer
  std::vector<double> block_totals_;
  // Of each block, once its layer is not clear: sums below this are written before all gradients are known to be finite.
  std::vector<T> limits_;
  // Of each block in the pass under way: the elements from its first on that were added; with non_finite::skip the elements that were
  // left out; or not_added.
  std::vector<std::uint16_t> block_notes_;
};

}  // namespace lamina::inline LAMINA_ABI
