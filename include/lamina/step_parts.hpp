// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <system_error>

#include "lamina/decoder.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/error.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/selection.hpp"

namespace lamina::inline LAMINA_ABI {

/// What has come of one sender's step: whether its parts follow each other, and which layers they have decided. A worker that
/// receives parameters in parts:
///
///     step_parts parts(model);
///     do {
///       frame = decode<T>(bytes, model);
///       expect_part(frame, frame_kind::parameters, step);
///       parts.add(frame);
///       for each layer l that is new in parts.is_decided(l):  frame.apply_to(l, parameters of l);   // use it from here on
///     } while (!parts.is_complete());
///     parts.next_step();
///
/// A whole frame is a step in one part. Keeps no frame and allocates nothing after it was made.
class step_parts {
 public:
  explicit step_parts(const layout& model) : decided_(model) {}

  /// Takes the next frame, whose kind, run and step the caller has checked. On an error nothing is changed. Throws decode_error
  /// with unexpected_part (a gap, a repetition, anything after the last part, a whole frame after a part), duplicate_sender (a
  /// second whole frame), duplicate_layer or bad_decided (a layer that was decided no longer is), and std::invalid_argument for a
  /// frame of another layout. Cost: O(L).
  template <element T>
  void add(const frame_view<T>& frame) {
    const std::error_code refused = refusal_of(frame);
    if (refused == errc::other_layout)
      detail::raise(std::invalid_argument("the frame was decoded for another layout than the step's"));
    if (refused) detail::raise(decode_error(refused, detail::describe(frame)));
    take(frame);
  }
  /// The same; in place of what is thrown `error` is set, to errc::other_layout too, and cleared if the frame was taken.
  template <element T>
  void add(const frame_view<T>& frame, std::error_code& error) noexcept {
    error = refusal_of(frame);
    if (!error) take(frame);
  }

  /// Why add() would refuse the frame; no error if it would take it.
  template <element T>
  [[nodiscard]] std::error_code refusal_of(const frame_view<T>& frame) const noexcept {
    if (!frame.is_of(decided_.model())) return errc::other_layout;
    if (!frame.is_part() && was_whole_) return frame_errc::duplicate_sender;
    if (is_complete_ || frame.part() != count_)
      return frame_errc::unexpected_part;  // a whole frame is part 0
    for (const std::size_t l : decided_.sent()) {
      if (!frame.is_dropped(l)) return frame_errc::duplicate_layer;
      if (!frame.is_decided(l)) return frame_errc::bad_decided;
    }
    return {};
  }

  /// Whether it is known of a layer if it was sent, and all of it is there. Of an empty layer, once anything came. Throws
  /// std::out_of_range.
  [[nodiscard]] bool is_decided(std::size_t layer) const {
    return decided_.is_sent(layer) || (decided_.model().sizes()[layer] == 0 && count_ > 0);
  }
  /// The layers that are decided, but for empty ones.
  [[nodiscard]] const selection& decided() const noexcept { return decided_; }
  /// Whether the last part is there.
  [[nodiscard]] bool is_complete() const noexcept { return is_complete_; }
  /// The parts that are there, of which a whole frame is one.
  [[nodiscard]] std::size_t count() const noexcept { return count_; }

  /// Waits for the first part of the next step.
  void next_step() noexcept {
    decided_.clear();
    count_ = 0;
    is_complete_ = was_whole_ = false;
  }

 private:
  template <element T>
  void take(const frame_view<T>& frame) noexcept {
    for (std::size_t l = 0; l < frame.layers(); ++l) {
      if (frame.is_decided(l)) decided_.send(l);
    }
    ++count_;
    is_complete_ = frame.ends_step();
    was_whole_ = !frame.is_part();
  }

  selection decided_;
  std::size_t count_ = 0;  // up to 65,536, which a part's number does not reach
  bool is_complete_ = false;
  bool was_whole_ = false;
};

}  // namespace lamina::inline LAMINA_ABI
