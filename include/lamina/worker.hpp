// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/codec.hpp"
#include "lamina/detail/gradient.hpp"
#include "lamina/execution.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/partition.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/selection.hpp"
#include "lamina/selector.hpp"
#include "lamina/state.hpp"

namespace lamina {

/// A worker's side: residual, threshold and codec together. Each step:
///
///     for each layer l:  compressor.accumulate(l, gradient of l);   // in any order, also in pieces
///     const encoded_frame& frame = compressor.encode();             // selects, writes the header, copies nothing
///     send frame.segments();
///     compressor.commit();                                          // once the send has completed
///
/// Only commit() clears what was sent. If a send fails, do not commit: go on with the next step, or encode again, and no
/// gradient is lost. Not for concurrent use. Allocates nothing after the first step, if
/// the payload goes as_is.
///
/// Decides by layer, or by part of a layer where options.part_elements says so: values, selection, residual and frames
/// are over parts().
template <element T, representative Representative = mean_abs>
class gradient_compressor {
 public:
  /// Throws std::invalid_argument, naming the option, for one outside its range, and for a model without layers.
  explicit gradient_compressor(const layout& model, compressor_options options = {},
                               Representative functor = {})
      : options_(options),
        functor_(std::move(functor)),
        partition_(model, options.part_elements),
        residual_(parts(), {.check = options.check, .momentum = options.momentum}),
        selector_(parts(), options),
        encoder_(parts()),
        values_(parts().layers()),
        accumulated_(parts().layers()) {
    if (model.layers() == 0) throw std::invalid_argument("a model without layers has nothing to compress");
    if (options.source == threshold_source::fresh) fresh_values_.resize(parts().layers());
  }

  /// Adds the gradient of one layer to its residual and gives the value of the layer, or of its last part. The first
  /// call after select(), encode() or commit() begins the next step. Errors as residual_accumulator::accumulate; other
  /// layers keep what they have, so after a refused gradient go on with the next batch in the same step.
  template <class Tensor, execution Execution = sequential>
  double accumulate(std::size_t layer, const Tensor& gradient, const Execution& execution = {}) {
    partition_.model().check_layer(layer);
    detail::visit_gradient<T>(gradient, [&](auto from) {
      add(
          layer, layer + 1, [&](std::size_t, const auto& visitor) { visitor(from); }, execution);
    });
    return values_[partition_.first(layer + 1) - 1];
  }

  /// The same for all layers at once, `gradients[l]` being the tensor of layer l: all are added or, on an error, none, so
  /// a batch with NaN in one layer is skipped whole. Where an execution starts threads, this is much quicker than layer
  /// by layer. Throws std::invalid_argument also for a number of tensors other than model().layers().
  template <std::ranges::random_access_range Tensors, execution Execution = sequential>
  std::span<const double> accumulate_all(const Tensors& gradients, const Execution& execution = {}) {
    const auto count = static_cast<std::size_t>(std::ranges::size(gradients));
    if (count != model().layers()) {
      throw std::invalid_argument("the model has " + std::to_string(model().layers()) + " layers, got " +
                                  std::to_string(count) + " gradients");
    }
    const auto tensors = std::ranges::begin(gradients);
    using index = std::ranges::range_difference_t<const Tensors>;
    add(
        0, count,
        [&](std::size_t layer, const auto& visitor) {
          detail::visit_gradient<T>(tensors[static_cast<index>(layer)], visitor);
        },
        execution);
    return values_;
  }

  /// q of each part after the last accumulate. A part that was sent since counts until it is accumulated again.
  std::span<const double> values() const noexcept { return values_; }

  /// Decides which parts go out; called again in the same step, gives the same. Throws std::logic_error, naming the
  /// layer, if one has no gradient yet in this step (empty layers need none), or if the step was committed already;
  /// std::invalid_argument if a value is NaN.
  const selection& select() {
    return decide(values_, options_.source == threshold_source::fresh ? fresh_values_ : values_);
  }

  /// The same by values that all workers have agreed on, mostly the mean of their values(): they then choose the same
  /// parts, and what one sends is what the server publishes. The library does not communicate; average with one small
  /// allreduce. Throws also for a number of values other than parts().layers().
  const selection& select(std::span<const double> agreed_values) {
    return decide(agreed_values, agreed_values);
  }

  /// The frame of this step, pointing into the residual: valid until the next accumulate, commit or encode. Selects
  /// first if that was not done. Throws as select().
  const encoded_frame& encode() {
    require_open_step("encode");
    select();
    encoder_.encode(
        frame_kind::gradients, step_, options_.sender, selector_.chosen(),
        [this](std::size_t part) { return residual_[part]; }, options_.payload);
    phase_ = phase::encoded;
    return encoder_.frame();
  }

  /// The frame has reached its receiver: takes what was sent out of the residual. Throws std::logic_error unless a frame
  /// was encoded and not committed yet.
  void commit() {
    if (phase_ != phase::encoded || encoder_.frame().size_bytes() == 0) {  // a copy has none
      throw std::logic_error("commit: no frame to commit in step " + std::to_string(step_) +
                             "; call encode() before, and commit() once for it");
    }
    std::size_t segment = 1;
    for (std::size_t part = 0; part < parts().layers(); ++part) {
      if (selector_.chosen().is_dropped(part)) continue;
      if (options_.payload == payload_type::as_is) {
        residual_.clear(part);
      } else {
        residual_.subtract(part, options_.payload, encoder_.frame().segments()[segment].data());
      }
      ++segment;
    }
    selector_.commit(step_);
    phase_ = phase::committed;
  }

  /// Everything a later step depends on, as bytes with a checksum; see state.hpp. Between steps alone: throws
  /// std::logic_error while gradients of a step wait to be encoded. A frame that was encoded and not committed counts as
  /// lost.
  std::vector<std::byte> save() const {
    if (phase_ == phase::accumulating || phase_ == phase::selected) {
      throw std::logic_error("save: step " + std::to_string(step_) +
                             " has gradients that were not encoded yet");
    }
    return save_state<T>(residual_, selector_.remember(), step_);
  }

  /// Takes up where a compressor of the same model and options was saved; from then on both do the same, bit for bit.
  /// Changes nothing and throws decode_error for bytes that are damaged or of another model, std::invalid_argument if
  /// they hold NaN or infinity.
  void load(std::span<const std::byte> bytes) {
    step_ = load_state<T>(bytes, residual_, selector_);
    phase_ = phase::committed;
  }

  /// t, counted from 1; 0 before the first accumulate.
  std::uint64_t step() const noexcept { return step_; }
  /// λ as of the last select().
  double threshold() const noexcept { return selector_.threshold(); }
  const residual_accumulator<T>& residual() const noexcept { return residual_; }
  /// The model given, and what is decided on: the layers themselves, or their parts. Frames are of parts().
  const layout& model() const noexcept { return partition_.model(); }
  const layout& parts() const noexcept { return partition_.parts(); }

 private:
  enum class phase { accumulating, selected, encoded, committed };

  // Adds the gradients of layers [first, last); `gradients` as in residual_accumulator::accumulate_layers.
  template <class Gradients, class Execution>
  void add(std::size_t first, std::size_t last, const Gradients& gradients, const Execution& execution) {
    for (std::size_t layer = first; layer < last; ++layer) {
      gradients(layer, [&](auto from) { model().check_size(layer, from.size()); });
    }
    const auto by_part = [&](std::size_t part, const auto& visitor) {
      gradients(partition_.layer_of(part),
                [&](auto from) { visitor(from.subspan(partition_.begin(part), parts().sizes()[part])); });
    };
    const std::size_t first_part = partition_.first(first);
    const std::size_t last_part = partition_.first(last);
    residual_.accumulate_layers(first_part, last_part, by_part,
                                std::span(values_).subspan(first_part, last_part - first_part), functor_,
                                execution);
    if (phase_ != phase::accumulating) begin_step();
    for (std::size_t part = first_part; part < last_part; ++part) {
      accumulated_[part] = 1;
      if (fresh_values_.empty()) continue;
      by_part(part, [&]<class G>(std::span<const G> from) {
        fresh_values_[part] = options_.check == finite_check::each_element
                                  ? detail::reduce_finite<T>(functor_, from)
                                  : detail::reduce_contiguous<T>(functor_, from);
      });
    }
  }

  const selection& decide(std::span<const double> values, std::span<const double> search_values) {
    require_open_step("select");
    if (phase_ != phase::accumulating) return selector_.chosen();
    require_all_accumulated();
    selector_.decide(step_, values, search_values);
    phase_ = phase::selected;
    return selector_.chosen();
  }

  void begin_step() {
    ++step_;
    std::ranges::fill(accumulated_, 0);
    phase_ = phase::accumulating;
  }

  void require_open_step(const char* call) const {
    if (phase_ == phase::committed) {
      throw std::logic_error(std::string(call) + ": step " + std::to_string(step_) +
                             (step_ == 0 ? " has no gradients yet" : " was committed") +
                             "; accumulate the gradients of the next step first");
    }
  }

  void require_all_accumulated() const {
    for (std::size_t part = 0; part < accumulated_.size(); ++part) {
      if (accumulated_[part] == 0 && parts().sizes()[part] > 0) {
        throw std::logic_error("step " + std::to_string(step_) + ": layer '" + parts()[part].name +
                               "' has no gradient yet; accumulate every layer before select() or encode()");
      }
    }
  }

  compressor_options options_;
  Representative functor_;
  partition partition_;
  residual_accumulator<T> residual_;
  layer_selector selector_;
  frame_encoder<T> encoder_;
  std::vector<double> values_;
  std::vector<double> fresh_values_;  // empty unless the threshold comes from them
  std::vector<char> accumulated_;
  std::uint64_t step_ = 0;
  phase phase_ = phase::committed;
};

}  // namespace lamina
