// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/codec.hpp"
#include "lamina/layout.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/selection.hpp"
#include "lamina/threshold.hpp"

namespace lamina {

struct compressor_options {
  /// R in [0, 1]: the share of the elements to hold back in a step. 0 turns layer dropping off; 1 sends
  /// everything, as Algorithm 1 finds no threshold then.
  double drop_ratio = 0.95;
  /// When the threshold is searched again. Every step by default: the search is cheap and a threshold that is
  /// not renewed goes stale as gradients shrink. The paper renews it every 100 steps.
  refresh_schedule refresh = refresh_schedule::every(1);
  /// This worker's index in [0, W), written into its frames.
  std::uint32_t sender = 0;
};

/// A worker's side: residual, threshold and codec together. Each step:
///
///     for each layer l:  compressor.accumulate(l, gradient of l);   // in any order, also in pieces
///     const encoded_frame& frame = compressor.encode();             // selects, writes the header, copies nothing
///     send frame.segments();
///     compressor.commit();                                          // once the send has completed
///
/// Only commit() clears what was sent. If a send fails, do not commit: go on with the next step, or encode
/// again, and no gradient is lost. Not for concurrent use. Allocates nothing after the first step.
template <element T, representative Representative = mean_abs>
class gradient_compressor {
 public:
  /// Throws std::invalid_argument for a drop ratio outside [0, 1] or a model without layers.
  explicit gradient_compressor(const layout& model, compressor_options options = {},
                               Representative functor = {})
      : options_(options),
        functor_(std::move(functor)),
        residual_(model),
        values_(model.layers()),
        accumulated_(model.layers()),
        selection_(model),
        encoder_(model),
        threshold_(options.refresh.fixed_threshold().value_or(invalid_threshold)) {
    check_drop_ratio(options.drop_ratio);
    if (model.layers() == 0) throw std::invalid_argument("a model without layers has nothing to compress");
  }

  /// Adds the gradient of one layer to its residual and gives the layer's new value. The first call after
  /// select(), encode() or commit() begins the next step. Errors as residual_accumulator::accumulate; other
  /// layers keep what they have, so after a refused gradient go on with the next batch in the same step.
  template <class Tensor>
  double accumulate(std::size_t layer, const Tensor& gradient) {
    const double value = residual_.accumulate(layer, gradient, functor_);
    if (phase_ != phase::accumulating) begin_step();
    values_[layer] = value;
    accumulated_[layer] = 1;
    return value;
  }

  /// q_l of each layer after the last accumulate: L values. A layer that was sent since counts until it is
  /// accumulated again.
  std::span<const double> values() const noexcept { return values_; }

  /// Decides which layers go out; called again in the same step, gives the same. Throws std::logic_error,
  /// naming the layer, if one has no gradient yet in this step (empty layers need none), or if the step was
  /// committed already.
  const selection& select() {
    require_open_step("select");
    if (phase_ != phase::accumulating) return selection_;
    require_all_accumulated();
    if (options_.drop_ratio > 0 && options_.refresh.due(step_)) {
      threshold_ = search_(values_, model().sizes(), options_.drop_ratio);
    }
    if (sends_everything()) {
      selection_.send_all();
    } else {
      selection_.apply_threshold(values_, threshold_);
    }
    phase_ = phase::selected;
    return selection_;
  }

  /// The frame of this step, pointing into the residual: valid until the next accumulate, commit or encode.
  /// Selects first if that was not done. Throws std::logic_error as select().
  const encoded_frame& encode() {
    require_open_step("encode");
    select();
    const encoded_frame& frame = encoder_.encode(frame_kind::gradients, step_, options_.sender, selection_,
                                                 [this](std::size_t l) { return residual_[l]; });
    phase_ = phase::encoded;
    return frame;
  }

  /// The frame has reached its receiver: clears the residual of the layers in it. Throws std::logic_error
  /// unless a frame was encoded and not committed yet.
  void commit() {
    if (phase_ != phase::encoded) {
      throw std::logic_error("commit: no frame to commit in step " + std::to_string(step_) +
                             "; call encode() before, and commit() once for it");
    }
    for (std::size_t l = 0; l < model().layers(); ++l) {
      if (selection_.is_sent(l)) residual_.clear(l);
    }
    phase_ = phase::committed;
  }

  /// t, counted from 1; 0 before the first accumulate.
  std::uint64_t step() const noexcept { return step_; }
  /// λ as of the last select().
  double threshold() const noexcept { return threshold_; }
  const residual_accumulator<T>& residual() const noexcept { return residual_; }
  const layout& model() const noexcept { return residual_.model(); }

 private:
  enum class phase { accumulating, selected, encoded, committed };

  // Not told by the value of the threshold: a functor with negative values may have a true threshold of -1.
  bool sends_everything() const {
    return options_.drop_ratio == 0 || (options_.drop_ratio == 1 && !options_.refresh.fixed_threshold());
  }

  void begin_step() {
    ++step_;
    accumulated_.assign(accumulated_.size(), 0);
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
    for (std::size_t l = 0; l < accumulated_.size(); ++l) {
      if (accumulated_[l] == 0 && model().sizes()[l] > 0) {
        throw std::logic_error("step " + std::to_string(step_) + ": layer '" + model()[l].name +
                               "' has no gradient yet; accumulate every layer before select() or encode()");
      }
    }
  }

  compressor_options options_;
  Representative functor_;
  residual_accumulator<T> residual_;
  std::vector<double> values_;
  std::vector<char> accumulated_;
  selection selection_;
  frame_encoder<T> encoder_;
  threshold_search search_;
  double threshold_;
  std::uint64_t step_ = 0;
  phase phase_ = phase::committed;
};

}  // namespace lamina
