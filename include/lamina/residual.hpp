// SPDX-License-Identifier: MIT
#pragma once

#include <exception>
#include <tuple>

#include "lamina/detail/residual_block.hpp"
#include "lamina/execution.hpp"
#include "lamina/payload.hpp"

/// The residual, and the pass that adds a gradient to it. Read representative.hpp before, worker.hpp after.
namespace lamina::inline LAMINA_ABI {

/// The residual a_l of every layer on one worker (the paper's "local cache"): what was computed and not sent yet.
///
/// N elements of T in one flat buffer, zero at first; twice that with momentum. Memory is touched first by the threads that add the first
/// gradients. Different layers may be used from different threads at a time; const members may be called from several threads at a time.
/// Throws std::out_of_range for a layer, or elements, that are not there.
template <element T>
class residual_accumulator {
 public:
  /// Of the options non_finite, momentum and memory count. Throws std::invalid_argument for a momentum outside [0, 1).
  explicit residual_accumulator(const layout& model, const worker_options& options = {})
      : skips_(options.non_finite == non_finite::skip),
        model_(model),
        momentum_(checked(options.momentum)),
        elements_(model, true, options.memory),
        velocity_(model, has_velocity(), options.memory),
        blocks_(model),
        layers_(model.layers()),
        block_totals_(blocks_.count()),
        limits_(blocks_.count()),
        block_notes_(blocks_.count()) {}
  residual_accumulator(const residual_accumulator&) = delete;
  residual_accumulator& operator=(const residual_accumulator&) = delete;

  /// The next gradient of each layer is the first of a step, for which the velocity decays. Without momentum nothing depends on it.
  void begin_step() noexcept {
    for (layer_state& each : layers_) each.has_decayed = false;
  }

  /// a_l <- a_l + g_l (eq. 1 of the paper) for the layers [first, last), and their representative values, in one pass: all of them are
  /// added or, where one holds NaN or infinity or would overflow the residual, none, to within the rounding that non_finite::refuse says.
  ///
  /// \param first, last     of the layers
  /// \param gradients       called with a layer and a visitor, it calls visitor(std::span<const G>) with the gradient of that layer, of T,
  ///                        float16 or bfloat16; more than once, and from several threads. A layer of which it does not stays as it is:
  ///                        was_given()
  /// \param values          gets q_l of these layers; 0 for an empty one
  /// \param representative  the functor whose value is wanted
  /// \param execution       runs the blocks of the layers; see execution.hpp
  /// \param factor          multiplies each element, as a T, before it is added
  /// \param kept            where an exception that `execution` throws goes, in place of the caller: what it has not run is run by the
  ///                        calling thread, and all layers are added
  /// \return                the first layer whose gradient is refused
  /// \throws std::invalid_argument  another size; a scale that is not finite. Nothing has changed
  ///
  /// A residual that is clear is written and not read. Bitwise the same on every machine and with any number of threads.
  template <class Gradients, representative Representative = mean_abs, execution Execution = sequential>
  std::optional<std::size_t> accumulate(std::size_t first, std::size_t last, const Gradients& gradients,
                                        std::span<double> values, const Representative& representative = {},
                                        const Execution& execution = {}, double factor = 1,
                                        std::exception_ptr* kept = nullptr) {
    look_at(first, last, gradients, values, factor);
    const T scale = static_cast<T>(factor);
    std::exception_ptr thrown;
    for (std::size_t block = blocks_.first(first); block < blocks_.first(last); ++block)
      block_notes_[block] = not_added;
    // Runs work(layer, block, elements, gradient) for the blocks of which is_due(note, elements) is true.
    const auto run = [&](const auto& is_due, const auto& work) {
      run_all(first, last, execution, thrown, [&](std::size_t layer, std::size_t index, std::size_t end) {
        gradients(layer, [&](auto from) {
          for (; index < end; ++index) {
            const detail::residual_block<T> block = block_of(layer, index, scale);
            if (is_due(block_notes_[index], block.count)) work(layer, index, block, from);
          }
        });
      });
    };
    const auto set_total = [&](std::size_t index, const detail::residual_block<T>& block, double total) {
      block_totals_[index] = total;
      if (!skips_) limits_[index] = block.limit(representative, total);
    };

    // Of each block elements are added up to the first whose sum is not below the block's limit, so that what is added does not depend
    // on threads. What is left of such blocks is looked at before more of it is added.
    std::atomic<bool> has_rest = false;
    const auto is_not_added = [](std::size_t note, std::size_t) { return note == not_added; };
    run(is_not_added, [&](std::size_t, std::size_t index, const auto& block, auto from) {
      const T limit = skips_ ? std::numeric_limits<T>::infinity() : limits_[index];
      auto sums = block.add(from, representative, limit);
      block_notes_[index] = static_cast<std::uint16_t>(skips_ ? 0 : sums.taken);
      if (sums.taken < block.count) {
        if (!skips_) return has_rest.store(true, std::memory_order_relaxed);
        std::tie(sums.total, block_notes_[index]) = block.add_rest(from, sums.taken, representative);
      }
      set_total(index, block, sums.total);
    });
    if (has_rest) {
      const auto is_in_part = [](std::size_t note, std::size_t count) { return note < count; };
      std::atomic<std::size_t> refused = last;
      run(is_in_part, [&](std::size_t layer, std::size_t index, const auto& block, auto from) {
        std::size_t lowest = refused;
        if (layer >= lowest || block.rest_is_finite(from, block_notes_[index])) return;
        while (layer < lowest && !refused.compare_exchange_weak(lowest, layer)) continue;
      });
      if (refused < last) {
        const auto has_some = [](std::size_t note, std::size_t) { return note != 0; };
        run(has_some, [&](std::size_t, std::size_t index, const auto& block, auto from) {
          const std::size_t taken = std::exchange(block_notes_[index], std::uint16_t{0});
          if (!block.is_clear) limits_[index] = block.undo(from, taken);
        });
        for (std::size_t layer = first; layer < last; ++layer) {
          if (is_clear(layer)) clear(layer);  // its memory is anything again
        }
        return refused.load();
      }
      run(is_in_part, [&](std::size_t, std::size_t index, const auto& block, auto from) {
        const std::size_t taken = std::exchange(block_notes_[index], static_cast<std::uint16_t>(block.count));
        set_total(index, block, block.add_rest(from, taken, representative).first);
      });
    }
    for (std::size_t layer = first; layer < last; ++layer)
      if (layers_[layer].is_given) values[layer - first] = finished(layer, representative);
#if LAMINA_HAS_EXCEPTIONS
    if (thrown && kept == nullptr) std::rethrow_exception(thrown);
#endif
    if (kept != nullptr) *kept = thrown;
    return std::nullopt;
  }
  /// Whether the last call had a gradient for it.
  [[nodiscard]] bool was_given(std::size_t layer) const noexcept {
    return layers_[layer].is_given;
  }

  /// The residual of one layer: n_l elements, valid as long as this object.
  [[nodiscard]] std::span<const T> operator[](std::size_t layer) const {
    model_.check_layer(layer);
    return elements_.read(layer);
  }

  /// Beyond the last element of any layer.
  static constexpr std::size_t to_the_end = static_cast<std::size_t>(-1);

  /// a_l <- 0: what was in it has been sent; or of elements [begin, end) alone, of which the receiver has got no others: those stay, and
  /// the layer is not clear. Cost: O(1) for a whole layer, since the next gradient is written over what is there; one write of a range.
  void clear(std::size_t layer, std::size_t begin = 0, std::size_t end = to_the_end) {
    check_range(layer, begin, end);
    elements_.clear(layer, begin, end);
    if (has_velocity()) velocity_.clear(layer, begin, end);
  }

  /// a_l <- a_l − what a payload says of it: it was sent, and what rounding took away stays. Exact. Of elements [begin, end) alone as
  /// clear(); throws std::invalid_argument for a payload with blocks unless `begin` is a multiple of payload_block_elements.
  void subtract(std::size_t layer, payload_type type, std::size_t begin = 0, std::size_t end = to_the_end) {
    check_range(layer, begin, end);
    if (has_blocks(type) && begin % payload_block_elements != 0) {
      detail::refuse("element ", begin, " of layer '", model_[layer].name, "' does not begin a block of the ",
                     detail::name_of(type), " payload");
    }
    if (type == payload_type::as_is) return clear(layer, begin, end);
    const std::span<T> all = elements_.read(layer);
    std::array<T, 1024> sent;
    std::array<std::byte, payload_bytes<T>(payload_type::float16, sent.size())> payload;  // the largest
    for (std::size_t at = begin; at < end; at += sent.size()) {
      // Also what lies beyond `end` in the last block, which shares its scale.
      const auto rest = all.subspan(at, (std::min)(sent.size(), all.size() - at));
      detail::encode_payload<T>(type, rest, payload.data());
      detail::decode_payload<T>(type, payload.data(), rest.size(), 0, std::span(sent).first(rest.size()));
      detail::subtract_elements(rest.data(), sent.data(), (std::min)(rest.size(), end - at));
    }
    if (has_velocity()) velocity_.clear(layer, begin, end);
  }

  /// Whether the residual of a layer is zero because it was cleared, or is new.
  [[nodiscard]] bool is_clear(std::size_t layer) const {
    model_.check_layer(layer);
    return elements_.is_clear(layer);
  }

  /// Elements left out so far by non_finite::skip.
  [[nodiscard]] std::size_t left_out_elements() const noexcept {
    std::size_t all = 0;
    for (const layer_state& each : layers_) all += each.left_out;
    return all;
  }

  [[nodiscard]] const layout& model() const noexcept {
    return model_;
  }

  /// All of it, for saving: N elements in the order of the layout, and the velocity, N elements or none.
  [[nodiscard]] std::span<const T> elements() const {
    return elements_.read();
  }
  [[nodiscard]] std::span<const T> velocity() const {
    return velocity_.read();
  }
  [[nodiscard]] bool has_velocity() const noexcept {
    return momentum_ > 0;
  }
  /// Puts saved elements back. Throws std::invalid_argument, before anything is written, unless the sizes are those of
  /// elements() and velocity() and all numbers are finite.
  void restore(std::span<const T> elements, std::span<const T> velocity) {
    if (elements.size() != elements_.size() || velocity.size() != velocity_.size()) {
      detail::refuse("the saved residual has ", elements.size(), " elements and ", velocity.size(),
                     " of velocity, where ", elements_.size(), " and ", velocity_.size(), " belong");
    }
    if (!detail::are_finite<T>(elements) || !detail::are_finite<T>(velocity))
      detail::refuse("the saved residual holds NaN or infinity");
    elements_.write(elements);
    velocity_.write(velocity);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      for (std::size_t block = blocks_.first(layer); block < blocks_.first(layer + 1); ++block)
        limits_[block] = block_of(layer, block, T(1)).limit();
    }
  }

 private:
  struct layer_state {
    bool has_decayed = false;  // in this step
    bool is_given = false;     // a gradient, in the call under way
    std::size_t left_out = 0;  // elements
  };
  // Throws unless the call can be carried out: all that can be wrong but for numbers.
  template <class Gradients>
  void look_at(std::size_t first, std::size_t last, const Gradients& gradients, std::span<double> values,
               double scale) {
    if (first > last || last > model_.layers())
      detail::refuse<std::out_of_range>("no layers [", first, ", ", last, ") among ", model_.layers());
    if (values.size() != last - first)
      detail::refuse("there is room for ", values.size(), " values of ", last - first, " layers");
    constexpr double most = (std::numeric_limits<T>::max)();
    if (!detail::is_finite(scale) || scale < -most || scale > most ||
        (static_cast<T>(scale) == T(0) && scale != 0)) {
      detail::refuse("the scale of the gradients must be a finite number of their type, got ", scale);
    }
    for (std::size_t layer = first; layer < last; ++layer) {
      bool& is_given = layers_[layer].is_given;
      is_given = false;
      gradients(layer, [&](auto from) {
        is_given = true;
        model_.check_size(layer, from.size());
      });
    }
  }

  // Runs work(layer, block, end) over all blocks. What an execution that throws leaves behind the calling thread does.
  template <class Execution, class Work>
  void run_all(std::size_t first, std::size_t last, const Execution& execution,
               [[maybe_unused]] std::exception_ptr& thrown, const Work& work) const {
#if LAMINA_HAS_EXCEPTIONS
    try {
      return blocks_.for_each_run(first, last, execution, work);
    } catch (...) {
      thrown = std::current_exception();
    }
    blocks_.for_each_run(first, last, sequential(), work);
#else
    blocks_.for_each_run(first, last, execution, work);
#endif
  }

  template <class Representative>
  double finished(std::size_t layer, const Representative& representative) {
    const std::size_t begin = blocks_.first(layer);
    const std::size_t blocks = blocks_.first(layer + 1) - begin;
    if (skips_) {
      for (const std::uint16_t left_out : std::span(block_notes_).subspan(begin, blocks))
        layers_[layer].left_out += left_out;
    }
    elements_.set_written(layer);
    if (has_velocity()) velocity_.set_written(layer);
    layers_[layer].has_decayed = true;
    return detail::finished_value(representative, std::span(block_totals_).subspan(begin, blocks),
                                  model_.sizes()[layer]);
  }

  detail::residual_block<T> block_of(std::size_t layer, std::size_t block, T scale) {
    const auto [begin, count] = blocks_.extent_of(layer, block);
    return {.residual = elements_.at(layer, begin),
            .velocity = has_velocity() ? velocity_.at(layer, begin) : nullptr,
            .begin = begin,
            .count = count,
            .is_clear = elements_.is_clear(layer),
            .velocity_is_clear = has_velocity() && velocity_.is_clear(layer),
            .decays = !layers_[layer].has_decayed,
            .momentum = momentum_,
            .scale = scale};
  }

  static T checked(double momentum) {
    if (detail::is_nan(momentum) || !(momentum >= 0 && momentum < 1) || !(static_cast<T>(momentum) < T(1)))
      detail::refuse("momentum must lie in [0, 1), got ", momentum);
    return static_cast<T>(momentum);
  }
  void check_range(std::size_t layer, std::size_t begin, std::size_t& end) const {
    model_.check_layer(layer);
    const std::size_t elements = model_.sizes()[layer];
    if (end == to_the_end) end = elements;
    if (begin > end || end > elements) {
      detail::refuse<std::out_of_range>("elements ", begin, " to ", end, " of layer '", model_[layer].name,
                                        "' are not among its ", elements);
    }
  }

  // In block_notes_: more than a block has elements.
  static constexpr std::uint16_t not_added = 0xffff;
  static_assert(detail::block_elements < not_added);

  bool skips_;
  layout model_;
  T momentum_;
  detail::residual_memory<T> elements_;
  detail::residual_memory<T> velocity_;  // empty without momentum
  detail::layer_blocks blocks_;
  std::vector<layer_state> layers_;
  std::vector<double> block_totals_;
  // Of each block, once its layer is not clear: sums below this are written before all gradients are known to be finite.
  std::vector<T> limits_;
  // Of each block in the pass under way: the elements from its first on that were added; with non_finite::skip the elements that were
  // left out; or not_added.
  std::vector<std::uint16_t> block_notes_;
};

}  // namespace lamina::inline LAMINA_ABI
