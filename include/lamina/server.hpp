// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/codec.hpp"
#include "lamina/detail/kernels.hpp"
#include "lamina/error.hpp"
#include "lamina/layout.hpp"
#include "lamina/selection.hpp"

namespace lamina {

/// The server's receiving side, synchronous: the mean of the workers' gradients in one step, from one frame of each
/// sender. A sender is a worker, or the leader of a node, whose frame is the sum over the node's workers.
///
///     aggregator.add(decode<T>(bytes, model));   // once for each sender, in any order
///     for each layer l:
///       aggregator.mean(l, [&](std::size_t begin, std::span<const T> mean) { update from element `begin` on });
///     aggregator.next_step();
///
/// Keeps views, not copies: the bytes of each frame must live until next_step().
template <element T>
class gradient_aggregator {
 public:
  /// Each worker sends for itself. Throws std::invalid_argument if there are no workers.
  gradient_aggregator(const layout& model, std::size_t workers, std::uint64_t first_step = 1)
      : gradient_aggregator(model, std::vector<std::size_t>(workers, 1), first_step) {}
  /// The frame of sender i is a sum over `workers_of_sender[i]` workers. Throws std::invalid_argument if there are no
  /// senders, and naming the sender, if one stands for no worker. A single sender wants its vector written out:
  /// `{3}` alone is the number 3, three workers that send for themselves.
  gradient_aggregator(const layout& model, std::vector<std::size_t> workers_of_sender,
                      std::uint64_t first_step = 1)
      : model_(model),
        workers_of_(std::move(workers_of_sender)),
        frames_(workers_of_.size()),
        arrived_(model),
        step_(first_step) {
    if (workers_of_.empty()) throw std::invalid_argument("a parameter server needs at least one worker");
    for (std::size_t sender = 0; sender < workers_of_.size(); ++sender) {
      if (workers_of_[sender] == 0) {
        throw std::invalid_argument("sender " + std::to_string(sender) + " stands for no worker");
      }
    }
  }

  /// Takes the frame of one sender. Throws decode_error with unexpected_kind, unexpected_step, unknown_sender or
  /// duplicate_sender and changes nothing; std::invalid_argument if the frame was decoded for another layout, and
  /// std::logic_error if the step was closed.
  void add(frame_view<T> frame) {
    if (!frame.is_of(model_)) {
      throw std::invalid_argument("the frame was decoded for another layout than the aggregator's");
    }
    expect(frame, frame_kind::gradients, step_);
    const std::string sender = "sender " + std::to_string(frame.sender()) + ", step " + std::to_string(step_);
    if (is_closed_) throw std::logic_error("add: the step is closed: " + sender);
    if (frame.sender() >= frames_.size())
      throw decode_error(make_error_code(frame_errc::unknown_sender), sender);
    std::optional<frame_view<T>>& place = frames_[frame.sender()];
    if (place) throw decode_error(make_error_code(frame_errc::duplicate_sender), sender);
    place.emplace(std::move(frame));
    ++frames_present_;
    workers_present_ += workers_of_[place->sender()];
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (!place->is_dropped(l)) arrived_.send(l);
    }
  }

  /// The step goes on without the senders that have not come: mean() is over the workers behind the frames that are
  /// there, and add() takes no more until next_step(). A sender that was left out must not commit: its gradients then
  /// stay in its residual and come later. Throws std::logic_error if no frame is there.
  void close() {
    if (frames_present_ == 0) {
      throw std::logic_error("close: no frame has arrived in step " + std::to_string(step_));
    }
    is_closed_ = true;
  }

  /// Whether the frames of all senders are there, in this step.
  bool is_complete() const noexcept { return frames_present_ == frames_.size(); }
  /// The layers that at least one sender sent in this step: to be updated and published; all others stay
  /// untouched, optimizer state included.
  const selection& arrived() const noexcept { return arrived_; }

  /// G_l = (1/W) Σ_s a_{s,l} over the senders s whose frames are there, W being the number of workers behind them: the
  /// mean divides by workers, not by leaders. Summed in the order of the senders' indices, so that the order of arrival
  /// does not matter; list [0] contributes zeros and costs nothing. Calls `consume(begin, mean)` with consecutive
  /// blocks: a std::span<const T> with the mean of the elements from `begin` on. A layer that did not arrive gives no
  /// block. Throws std::logic_error before all frames are there, unless the step was closed; std::out_of_range for the
  /// index.
  template <class Consume>
  void mean(std::size_t layer, Consume&& consume) const {
    model_.check_layer(layer);
    if (!is_complete() && !is_closed_) {
      throw std::logic_error("mean: " + std::to_string(frames_present_) + " of " +
                             std::to_string(frames_.size()) + " frames have arrived in step " +
                             std::to_string(step_));
    }
    if (arrived_.is_dropped(layer)) return;
    std::array<T, detail::block_elements> block;
    for (std::size_t begin = 0; begin < model_.sizes()[layer]; begin += block.size()) {
      const std::size_t count = std::min(block.size(), model_.sizes()[layer] - begin);
      const std::span<T> sum = std::span(block).first(count);
      sum_block(layer, begin, sum);
      for (T& element : sum) element /= static_cast<T>(workers_present_);
      consume(begin, std::span<const T>(sum));
    }
  }

  /// Forgets the frames and waits for those of the next step, from all senders.
  void next_step() {
    std::ranges::fill(frames_, std::nullopt);
    frames_present_ = 0;
    workers_present_ = 0;
    is_closed_ = false;
    arrived_.clear();
    ++step_;
  }

  /// The step whose frames are accepted.
  std::uint64_t step() const noexcept { return step_; }
  /// The frames to expect in a step, and the workers behind them.
  std::size_t senders() const noexcept { return frames_.size(); }
  std::size_t workers() const noexcept {
    return std::accumulate(workers_of_.begin(), workers_of_.end(), std::size_t{0});
  }
  /// The workers behind the frames that are there: what mean() divides by.
  std::size_t workers_present() const noexcept { return workers_present_; }

 private:
  void sum_block(std::size_t layer, std::size_t begin, std::span<T> sum) const {
    bool first = true;
    for (const auto& frame : frames_) {
      if (!frame || frame->is_dropped(layer)) continue;
      if (first) {
        frame->copy(layer, begin, sum);
        first = false;
        continue;
      }
      std::array<T, detail::block_elements> buffer;
      const std::span<const T> part = frame->read(layer, begin, std::span(buffer).first(sum.size()));
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
  }

  layout model_;
  std::vector<std::size_t> workers_of_;
  std::vector<std::optional<frame_view<T>>> frames_;
  std::size_t frames_present_ = 0;
  std::size_t workers_present_ = 0;
  bool is_closed_ = false;
  selection arrived_;
  std::uint64_t step_;
};

/// The server's sending side: to each worker the layers that were updated since that worker's last frame,
/// list [0] for the rest. A worker's first frame holds every layer.
///
/// "Updated" is counted for each worker on its own. A synchronous server sends one frame to all; an
/// asynchronous one replies to the worker it heard from, and that worker then also gets the updates that
/// others caused.
///
/// Counts updates with one clock: layer l carries the time of its last update, worker w the time of its last
/// frame.
template <element T>
class parameter_publisher {
 public:
  /// Throws std::invalid_argument if there are no workers.
  parameter_publisher(const layout& model, std::size_t workers)
      : updated_at_(model.layers(), 1),
        seen_(workers, 0),
        encoded_at_(workers, 0),
        unseen_(model),
        encoder_(model) {
    if (workers == 0) throw std::invalid_argument("a parameter server needs at least one worker");
  }

  /// The parameters of these layers have changed. Throws std::invalid_argument for a selection of another layout.
  void update(const selection& layers) {
    if (layers.model().fingerprint() != unseen_.model().fingerprint()) {
      throw std::invalid_argument("the selection is of another layout than the publisher's");
    }
    ++clock_;
    for (std::size_t l = 0; l < updated_at_.size(); ++l) {
      if (layers.is_sent(l)) updated_at_[l] = clock_;
    }
  }

  /// The frame for one worker. `parameters(l)` gives layer l as a std::span<const T>, which the frame points
  /// into; the frame is valid until the next encode. Throws std::out_of_range for the worker.
  template <class Parameters>
  const encoded_frame& encode(std::size_t worker, std::uint64_t step, Parameters&& parameters) {
    const encoded_frame& frame = encode_since(seen_.at(worker), step, parameters);
    encoded_at_[worker] = clock_;  // only now: an encode that threw has nothing to commit
    return frame;
  }

  /// One frame for all workers: every layer that at least one of them has not seen.
  template <class Parameters>
  const encoded_frame& encode_for_all(std::uint64_t step, Parameters&& parameters) {
    const encoded_frame& frame = encode_since(*std::ranges::min_element(seen_), step, parameters);
    std::ranges::fill(encoded_at_, clock_);
    return frame;
  }

  /// The last frame encoded for this worker has reached it. Until then encode repeats what was in it, so that
  /// a send that failed loses nothing. Throws std::out_of_range.
  void commit(std::size_t worker) { seen_.at(worker) = encoded_at_.at(worker); }
  void commit_all() { seen_ = encoded_at_; }

  /// The layers in the last frame encoded.
  const selection& published() const noexcept { return unseen_; }

 private:
  template <class Parameters>
  const encoded_frame& encode_since(std::uint64_t seen, std::uint64_t step, Parameters& parameters) {
    unseen_.clear();
    for (std::size_t l = 0; l < updated_at_.size(); ++l) {
      if (updated_at_[l] > seen) unseen_.send(l);
    }
    return encoder_.encode(frame_kind::parameters, step, 0, unseen_, parameters);
  }

  std::uint64_t clock_ = 1;
  std::vector<std::uint64_t> updated_at_;  // L times
  std::vector<std::uint64_t> seen_;        // W times
  std::vector<std::uint64_t> encoded_at_;  // W times
  selection unseen_;
  frame_encoder<T> encoder_;
};

}  // namespace lamina
