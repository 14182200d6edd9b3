// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/encoder.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/part_encoder.hpp"
#include "lamina/selection.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI {

/// How a server publishes.
struct publisher_options {
  /// How the parameters are written. As they are, each replica holds the server's numbers. Another type saves bytes and
  /// rounds: the server's parameters are not what the workers hold, and nothing makes up for the difference, as no residual
  /// takes what was rounded off; a layer's rounding lasts until the layer is next sent. A number beyond the type's range becomes
  /// its largest; NaN and infinity stay what they are in the half-width types, and int8 and int4 refuse them.
  payload_type payload = payload_type::as_is;
  /// Written into the frames, as compressor_options::run is into the workers'; 0: none.
  std::uint32_t run = 0;
  /// Whether frames carry a checksum.
  lamina::frame_checksum frame_checksum = lamina::frame_checksum::xxh3;
};

/// The server's sending side: to each worker the layers that were updated since that worker's last frame, the rest held
/// back, which means keep. A worker's first frame holds every layer. The worker takes it with frame_view::apply_to.
///
/// "Updated" is counted for each worker on its own. A synchronous server sends one frame to all; an
/// asynchronous one replies to the worker it heard from, and that worker then also gets the updates that
/// others caused.
///
/// Each worker has a frame of its own, so that replies to several can be under way at once; as the payload as_is points into
/// the parameters, these must not change while a frame is. Memory: for each worker that was replied to, O(L), and with a
/// payload other than as_is the bytes of its largest frame.
///
/// Where a way may lose parts of a frame, commit(worker, delivery) keeps what this worker has lost, and pending(worker) is what
/// the next transfer to it must bring: as part of its frame, or beside that. A value that was lost is then wrong for one transfer.
/// Ranges beside a frame can be sent as_is alone: with another payload nothing may be lost, or update() the layers of what was.
///
/// Counts updates with one clock: layer l carries the time of its last update, worker w the time of its last
/// frame.
template <element T>
class parameter_publisher {
 public:
  /// Throws std::invalid_argument if there are no workers.
  parameter_publisher(const layout& model, std::size_t workers, publisher_options options = {})
      : model_(model),
        options_(options),
        updated_at_(model.layers(), 1),
        seen_(workers, 0),
        encoded_at_(workers, 0),
        last_frame_(workers, last_frame::none),
        pending_(workers),
        replies_(workers),
        nothing_(model),
        news_(model) {
    if (workers == 0) detail::raise(std::invalid_argument("a parameter server needs at least one worker"));
  }

  /// The parameters of these layers have changed. Throws std::invalid_argument for a selection of another layout, and
  /// std::logic_error for a layer that a part of the step under way has published.
  void update(const selection& layers) {
    if (layers.model().fingerprint() != model_.fingerprint()) {
      detail::raise(std::invalid_argument("the selection is of another layout than the publisher's"));
    }
    if (parts_to_all_ && parts_to_all_->encoder.count() > 0 && !parts_to_all_->encoder.is_complete()) {
      for (const std::size_t l : layers.sent()) check_not_decided(l);
    }
    ++clock_;
    for (std::size_t l = 0; l < updated_at_.size(); ++l) {
      if (layers.is_sent(l)) updated_at_[l] = clock_;
    }
  }

  /// The frame for one worker, valid until the next for this worker.
  ///
  /// \param worker      index in [0, W)
  /// \param step        written into the frame
  /// \param parameters  `parameters(l)` gives layer l as a std::span<const T> of n_l elements, or as a reference to what one is
  ///                    made of; called for the layers sent
  /// \throws std::out_of_range      for the worker
  /// \throws std::invalid_argument  a span has another size than its layer, or a layer to be written as int8 or int4 holds NaN or
  ///                                infinity; there is no frame then, and nothing to commit
  template <class Parameters>
  [[nodiscard]] const encoded_frame& encode(std::size_t worker, std::uint64_t step, Parameters&& parameters) {
    encoded_at_[worker] = seen_.at(worker);  // an encode that throws has nothing to commit
    last_frame_[worker] = last_frame::none;
    const encoded_frame& frame = encode_since(seen_[worker], step, replies_[worker], parameters);
    encoded_at_[worker] = clock_;
    last_frame_[worker] = last_frame::own;
    return frame;
  }

  /// One frame for all workers: every layer that at least one of them has not seen. Valid until the next for all. Errors as
  /// above.
  template <class Parameters>
  [[nodiscard]] const encoded_frame& encode_for_all(std::uint64_t step, Parameters&& parameters) {
    std::copy(seen_.begin(), seen_.end(), encoded_at_.begin());
    std::fill(last_frame_.begin(), last_frame_.end(), last_frame::none);
    if (parts_to_all_) parts_to_all_->encoder.forget();
    const encoded_frame& frame =
        encode_since(*std::min_element(seen_.begin(), seen_.end()), step, reply_to_all_, parameters);
    for (auto& each : encoded_at_) each = clock_;
    std::fill(last_frame_.begin(), last_frame_.end(), last_frame::of_all);
    return frame;
  }

  /// The same frame in parts, while layers are still updated: those of `decided` that encode_for_all() would hold and no part of
  /// this step has yet. Decided is a layer that this step will not update any more, whether it has or not; update() comes before.
  /// Valid until the first part of the next step, so that several may be under way; the parameters in it must not change before
  /// it has arrived. The step ends with encode_rest_for_all(), and is committed once, after that has arrived; a commit before
  /// commits nothing. Throws as encode_for_all(); std::invalid_argument, too, for a selection of another layout;
  /// std::length_error for part 65,536. On an error there is no such part, and those before it stay. `decided` has the layers that are
  /// decided so far, those of the parts before among them; empty ones are not looked at.
  template <class Parameters>
  [[nodiscard]] const encoded_frame& encode_ready_for_all(std::uint64_t step, const selection& decided,
                                                          Parameters&& parameters) {
    return encode_part_for_all(step, decided, false, parameters);
  }
  /// The last part: every layer is decided.
  template <class Parameters>
  [[nodiscard]] const encoded_frame& encode_rest_for_all(std::uint64_t step, Parameters&& parameters) {
    selection all(model_);
    all.send_all();
    return encode_part_for_all(step, all, true, parameters);
  }

  /// The last frame encoded for this worker, or for all, has reached it. Until then encode repeats what was in it, so that
  /// a send that failed loses nothing. Throws std::out_of_range.
  ///
  /// It is of the *last* frame, whichever it was: with two under way to one worker, an acknowledgement of the first must not
  /// commit, or what only the second holds is lost with it. Encode the next for a worker once the one before has arrived, or
  /// commit only when the last has.
  void commit(std::size_t worker) {
    seen_.at(worker) = encoded_at_.at(worker);
    end_frame(worker);
  }
  void commit_all() noexcept {
    std::copy(encoded_at_.begin(), encoded_at_.end(), seen_.begin());
    for (std::size_t worker = 0; worker < pending_.size(); ++worker) end_frame(worker);
  }
  /// The same of a frame that has reached the worker in part, together with all that was pending(): what was lost is now.
  /// Throws std::out_of_range; std::logic_error unless there is a frame for this worker that was not committed yet;
  /// std::invalid_argument, changing nothing, unless `arrived` is of that frame and, with an int8 or int4 payload, in chunks of a
  /// multiple of payload_block_elements.
  void commit(std::size_t worker, const delivery& arrived) {
    if (last_frame_.at(worker) == last_frame::none) {
      detail::raise(std::logic_error("commit: no frame for worker " + std::to_string(worker) +
                                     " to commit; call encode() before, and commit() once for it"));
    }
    const bool is_own = last_frame_[worker] == last_frame::own;
    detail::check_delivery("commit", arrived, is_own ? published(worker) : published_to_all(),
                           options_.payload);
    std::vector<element_range> lost;
    for (const std::size_t l : arrived.sent().sent()) {
      arrived.for_each_lost(l, [&](std::size_t begin, std::size_t end) { lost.push_back({l, begin, end}); });
    }
    commit(worker);
    // One that was forgotten since has nothing: its next frame holds every layer, and nothing beside that.
    if (seen_[worker] != 0) pending_[worker] = std::move(lost);
  }
  /// What this worker has lost, ascending: the next transfer to it must bring it, whatever else it loses. A range of a layer of
  /// that frame, published(worker) or published_to_all(), must not be lost in it; the others are to be sent beside it, out of the parameters as they are
  /// now: their layers were not updated since. Until a commit all of it stays. Throws std::out_of_range.
  [[nodiscard]] std::span<const element_range> pending(std::size_t worker) const {
    return pending_.at(worker);
  }

  /// The worker was restarted and has seen nothing: its next frame holds every layer, and nothing is pending. A commit of what
  /// was encoded for it before commits nothing, and a step that goes out in parts begins again. Throws std::out_of_range.
  void forget(std::size_t worker) {
    seen_.at(worker) = encoded_at_.at(worker) = 0;
    pending_[worker].clear();
    if (parts_to_all_ && !parts_to_all_->encoder.is_complete()) parts_to_all_->encoder.forget();
  }

  /// The layers in the last frame of encode() for this worker, none before the first and after an encode that threw. Throws
  /// std::out_of_range.
  [[nodiscard]] const selection& published(std::size_t worker) const {
    return layers_in(replies_.at(worker));
  }
  /// The same of encode_for_all(), or of the parts of the step so far.
  [[nodiscard]] const selection& published_to_all() const noexcept { return layers_in(reply_to_all_); }

 private:
  struct reply {
    selection layers;
    frame_encoder<T> encoder;
  };

  struct reply_in_parts {
    part_encoder<T> encoder;
    selection decided;  // by the last part
  };

  /// Which frame a commit of a worker is of.
  enum class last_frame : std::uint8_t { none, own, of_all };

  void end_frame(std::size_t worker) noexcept {
    if (last_frame_[worker] != last_frame::none) pending_[worker].clear();
    last_frame_[worker] = last_frame::none;
  }

  void find_news(std::uint64_t seen) {
    news_.clear();
    for (std::size_t l = 0; l < updated_at_.size(); ++l) {
      if (updated_at_[l] > seen) news_.send(l);
    }
  }

  template <class Parameters>
  const encoded_frame& encode_since(std::uint64_t seen, std::uint64_t step, std::optional<reply>& to,
                                    Parameters& parameters) {
    if (!to) to.emplace(reply{selection(model_), frame_encoder<T>(model_, options_.run)});
    to->layers.clear();
    to->encoder.forget();
    find_news(seen);
    const encoded_frame& frame = to->encoder.encode(frame_kind::parameters, step, 0, news_, parameters,
                                                    options_.payload, options_.frame_checksum);
    std::swap(to->layers, news_);
    return frame;
  }

  template <class Parameters>
  const encoded_frame& encode_part_for_all(std::uint64_t step, const selection& decided, bool is_last,
                                           Parameters& parameters) {
    if (!parts_to_all_)
      parts_to_all_.emplace(reply_in_parts{part_encoder<T>(model_, options_.run), selection(model_)});
    if (!reply_to_all_)
      reply_to_all_.emplace(reply{selection(model_), frame_encoder<T>(model_, options_.run)});
    find_news(*std::min_element(seen_.begin(), seen_.end()));
    part_encoder<T>& encoder = parts_to_all_->encoder;
    const encoded_frame& frame = encoder.encode(frame_kind::parameters, step, 0, news_, decided, is_last,
                                                parameters, options_.payload, options_.frame_checksum);
    parts_to_all_->decided = decided;
    if (encoder.count() == 1) reply_to_all_->layers.clear();
    for (const std::size_t l : encoder.layers(encoder.count() - 1).sent()) reply_to_all_->layers.send(l);
    if (is_last) {
      for (auto& each : encoded_at_) each = clock_;
    } else {
      std::copy(seen_.begin(), seen_.end(), encoded_at_.begin());
    }
    std::fill(last_frame_.begin(), last_frame_.end(), is_last ? last_frame::of_all : last_frame::none);
    return frame;
  }

  void check_not_decided(std::size_t layer) const {
    if (!parts_to_all_->decided.is_sent(layer)) return;
    detail::raise(
        std::logic_error("update: a part of the step under way has published '" + model_[layer].name + "'"));
  }

  const selection& layers_in(const std::optional<reply>& of) const noexcept {
    return of ? of->layers : nothing_;
  }

  layout model_;
  publisher_options options_;
  std::uint64_t clock_ = 1;
  std::vector<std::uint64_t> updated_at_;            // L times
  std::vector<std::uint64_t> seen_;                  // W times
  std::vector<std::uint64_t> encoded_at_;            // W times
  std::vector<last_frame> last_frame_;               // W
  std::vector<std::vector<element_range>> pending_;  // W
  std::vector<std::optional<reply>> replies_;        // made when first used
  std::optional<reply> reply_to_all_;
  std::optional<reply_in_parts> parts_to_all_;
  selection nothing_;
  selection news_;  // of the frame that is being encoded
};

}  // namespace lamina::inline LAMINA_ABI
