// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/decoder.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/elementwise.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/error.hpp"
#include "lamina/execution.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/selection.hpp"
#include "lamina/step_parts.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI {

/// How a server takes what workers send.
struct aggregator_options {
  /// The step whose frames are accepted first; after a resume at step t, t + 1.
  std::uint64_t first_step = 1;
  /// Frames of another run are refused: see compressor_options::run. 0: frames that name none.
  std::uint32_t run = 0;
  /// What the frames are of: gradients, or the updates of a drift_compressor.
  frame_kind kind = frame_kind::gradients;
};

/// The server's receiving side, synchronous: the mean of the workers' gradients in one step, from one frame of each
/// sender. A sender is a worker, or the leader of a node, whose frame is the sum over the node's workers.
///
///     auto aggregator = gradient_aggregator<T>::of_workers(model, W);
///     aggregator.add(decode<T>(bytes, model));   // once for each sender, in any order
///     for each layer l:
///       aggregator.mean(l, [&](std::size_t begin, std::span<const T> mean) { update from element `begin` on });
///     aggregator.next_step();
///
/// A sender's step may come in parts, in their order, those of several senders mixed. A layer that all senders have decided is
/// resolved, and its mean is there before the step is complete:
///
///     aggregator.add(decode<T>(bytes, model));
///     for each layer l that is new in aggregator.is_resolved(l):  aggregator.mean(l, ...);
///
/// Keeps views, not copies: the bytes of each frame must live until next_step().
template <element T>
class gradient_aggregator {
 public:
  /// Each worker sends for itself: sender i is worker i. Throws std::invalid_argument if there are no workers.
  [[nodiscard]] static gradient_aggregator of_workers(const layout& model, std::size_t workers,
                                                      aggregator_options options = {}) {
    return gradient_aggregator(model, std::vector<std::size_t>(workers, 1), options);
  }
  /// The frame of sender i is a sum over `workers_of_sender[i]` workers. Throws std::invalid_argument if there are no
  /// senders, and naming the sender, if one stands for no worker.
  [[nodiscard]] static gradient_aggregator of_nodes(const layout& model,
                                                    const std::vector<std::size_t>& workers_of_sender,
                                                    aggregator_options options = {}) {
    return gradient_aggregator(model, workers_of_sender, options);
  }

  /// Takes the frame of one sender, or the next part of its step. On an error nothing is changed. Throws decode_error with
  /// unexpected_kind, other_run, unexpected_step, unknown_sender or duplicate_sender, and of parts unexpected_part,
  /// duplicate_layer or bad_decided, as step_parts; std::invalid_argument if the frame was decoded for another
  /// layout or moved from, and std::logic_error if the step was closed.
  void add(frame_view<T> frame) {
    const std::error_code refused = refusal_of(frame);
    if (refused == errc::other_layout)
      detail::raise(std::invalid_argument("the frame was decoded for another layout than the aggregator's"));
    if (refused == errc::out_of_order)
      detail::raise(std::logic_error("add: the step is closed: " + detail::describe(frame)));
    if (refused) detail::refuse(refused, frame, step_, options_.run);
    take(std::move(frame));
  }
  /// The same; in place of what is thrown `error` is set to the frame_errc, to errc::other_layout, to errc::out_of_order, or, of
  /// a part, to std::errc::not_enough_memory, and cleared if the frame was taken.
  void add(frame_view<T> frame, std::error_code& error) noexcept {
    error = refusal_of(frame);
    if (error) return;
#if LAMINA_HAS_EXCEPTIONS
    try {
      take(std::move(frame));
    } catch (const std::bad_alloc&) {
      error = std::make_error_code(std::errc::not_enough_memory);
    }
#else
    take(std::move(frame));
#endif
  }

  /// The step goes on without the senders that have not come: mean() is over the workers behind the frames that are
  /// there, and add() takes no more until next_step(). A sender that was left out must not commit: its gradients then
  /// stay in its residual and come later. Throws std::logic_error if no frame is there, and naming the sender, if some of a
  /// sender's parts are there and its last is not: a mean may have used them.
  void close() {
    if (workers_present_ == 0) {
      detail::raise(std::logic_error("close: no frame has arrived in step " + std::to_string(step_)));
    }
    for (std::size_t s = 0; s < senders_.size(); ++s) {
      if (senders_[s].parts.count() == 0 || senders_[s].parts.is_complete()) continue;
      detail::raise(std::logic_error("close: sender " + std::to_string(s) + " has sent " +
                                     std::to_string(senders_[s].parts.count()) + " of its parts of step " +
                                     std::to_string(step_) + ", and not the last"));
    }
    is_closed_ = true;
  }

  /// Whether the frames of all senders are there, in this step, to the last part.
  [[nodiscard]] bool is_complete() const noexcept {
    return complete_ == senders_.size();
  }
  /// Whether a layer is decided for every sender, so that mean() has it; once the step was closed, every layer is. Throws
  /// std::out_of_range.
  [[nodiscard]] bool is_resolved(std::size_t layer) const {
    model_.check_layer(layer);
    return is_closed_ ||
           std::ranges::all_of(senders_, [&](const sender& each) { return each.parts.is_decided(layer); });
  }
  /// The layers that at least one sender sent in this step: to be updated and published; all others stay
  /// untouched, optimizer state included.
  [[nodiscard]] const selection& arrived() const noexcept {
    return arrived_;
  }

  /// G_l = (1/W) Σ_s a_{s,l} over the senders s whose frames are there, W being the number of workers behind them: the
  /// mean divides by workers, not by leaders. Summed in the order of the senders' indices, so that the order of arrival
  /// does not matter; a layer held back contributes zeros and costs nothing. The sum comes before the division: one beyond the
  /// range of T is infinite.
  ///
  /// Calls `consume(begin, mean)` with blocks that together are the layer: a std::span<const T> with the mean of the
  /// elements from `begin` on, up to 4,096 of them, valid during the call. A layer that did not arrive gives no block. The
  /// blocks are consecutive; with an execution of several threads `consume` is called from these, in any order and for
  /// several blocks at a time, and does not throw. The numbers are the same bits.
  ///
  /// \param layer      index of the layer
  /// \param consume    takes the blocks
  /// \param execution  what the blocks are shared by, in pieces of 65,536 elements; execution.hpp
  /// \throws std::out_of_range  for the index
  /// \throws std::logic_error   before the layer is resolved
  template <class Consume, execution Execution = sequential>
  void mean(std::size_t layer, Consume&& consume, const Execution& execution = {}) const {
    model_.check_layer(layer);
    if (!is_resolved(layer)) {
      const auto decided =
          std::ranges::count_if(senders_, [&](const sender& each) { return each.parts.is_decided(layer); });
      detail::raise(std::logic_error("mean: " + std::to_string(decided) + " of " +
                                     std::to_string(senders_.size()) + " senders have decided '" +
                                     model_[layer].name + "' in step " + std::to_string(step_)));
    }
    if (arrived_.is_dropped(layer)) return;
    const std::size_t elements = model_.sizes()[layer];
    const auto piece = [&](std::size_t index) {
      const std::size_t first = index * piece_elements;
      mean_of_blocks(layer, first, first + (std::min)(piece_elements, elements - first), consume);
    };
    if (elements <= piece_elements) {
      piece(0);
    } else {
      execution(elements / piece_elements + (elements % piece_elements != 0), piece);
    }
  }

  /// Forgets the frames and waits for those of the next step, from all senders.
  void next_step() noexcept {
    for (sender& each : senders_) {
      each.parts.next_step();
      each.frames.clear();
      std::ranges::fill(each.frame_of, nowhere);
    }
    complete_ = 0;
    workers_present_ = 0;
    is_closed_ = false;
    arrived_.clear();
    ++step_;
  }

  /// The step whose frames are accepted.
  [[nodiscard]] std::uint64_t step() const noexcept {
    return step_;
  }
  /// The senders to expect frames of in a step, and the workers behind them.
  [[nodiscard]] std::size_t senders() const noexcept {
    return senders_.size();
  }
  [[nodiscard]] std::size_t workers() const noexcept {
    std::size_t workers = 0;
    for (const sender& each : senders_) workers += each.workers;
    return workers;
  }
  /// The workers behind the senders of which something is there: what mean() divides by.
  [[nodiscard]] std::size_t workers_present() const noexcept {
    return workers_present_;
  }

 private:
  // One task of an execution: enough blocks to be worth handing to a thread.
  static constexpr std::size_t piece_elements = 16 * detail::block_elements;

  static constexpr std::uint32_t nowhere = ~std::uint32_t{0};

  struct sender {
    sender(const layout& model, std::size_t count_of_workers)
        : workers(count_of_workers), parts(model), frame_of(model.layers(), nowhere) {
      frames.reserve(1);
    }
    std::size_t workers;                  // whose sum it sends
    step_parts parts;                     // of this step
    std::vector<frame_view<T>> frames;    // one, or those of the parts
    std::vector<std::uint32_t> frame_of;  // for each layer which of them has it
  };

  gradient_aggregator(const layout& model, const std::vector<std::size_t>& workers_of_sender,
                      aggregator_options options)
      : model_(model), options_(options), arrived_(model), step_(options.first_step) {
    if (workers_of_sender.empty())
      detail::raise(std::invalid_argument("a parameter server needs at least one worker"));
    for (const std::size_t workers : workers_of_sender) {
      if (workers == 0) {
        detail::raise(
            std::invalid_argument("sender " + std::to_string(senders_.size()) + " stands for no worker"));
      }
      senders_.emplace_back(model, workers);
    }
  }

  // Why the frame cannot be taken.
  std::error_code refusal_of(const frame_view<T>& frame) const noexcept {
    if (!frame.is_of(model_)) return errc::other_layout;
    std::error_code error;
    expect_part(frame, options_.kind, step_, error, options_.run);
    if (error) return error;
    if (is_closed_) return errc::out_of_order;
    if (frame.sender() >= senders_.size()) return frame_errc::unknown_sender;
    return senders_[frame.sender()].parts.refusal_of(frame);
  }

  // Memory comes first: it may not be there for one part more.
  void take(frame_view<T>&& frame) {
    sender& of = senders_[frame.sender()];
    of.frames.emplace_back();
    if (of.parts.count() == 0) workers_present_ += of.workers;
    of.parts.add(frame);
    if (of.parts.is_complete()) ++complete_;
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (frame.is_dropped(l)) continue;
      arrived_.send(l);
      of.frame_of[l] = static_cast<std::uint32_t>(of.frames.size() - 1);
    }
    of.frames.back() = std::move(frame);
  }

  // Elements [begin, end) of a layer, block by block, so that a sum stays in cache until it is consumed.
  template <class Consume>
  void mean_of_blocks(std::size_t layer, std::size_t begin, std::size_t end, Consume& consume) const {
    std::array<T, detail::block_elements> sum;
    std::array<T, detail::block_elements> buffer;
    for (; begin < end; begin += sum.size()) {
      const std::size_t count = (std::min)(sum.size(), end - begin);
      const std::span<T> block = std::span(sum).first(count);
      bool is_first = true;
      for (const sender& each : senders_) {
        if (each.frame_of[layer] == nowhere) continue;
        const frame_view<T>& frame = each.frames[each.frame_of[layer]];
        if (is_first) {
          frame.copy(layer, begin, block);
          is_first = false;
        } else {
          const std::span<const T> addend = frame.read(layer, begin, std::span(buffer).first(count));
          detail::add_elements(block.data(), addend.data(), count);
        }
      }
      detail::divide_elements(block.data(), static_cast<T>(workers_present_), count);
      consume(begin, std::span<const T>(block));
    }
  }

  layout model_;
  aggregator_options options_;
  std::vector<sender> senders_;
  std::size_t complete_ = 0;
  std::size_t workers_present_ = 0;
  bool is_closed_ = false;
  selection arrived_;
  std::uint64_t step_;
};

}  // namespace lamina::inline LAMINA_ABI
