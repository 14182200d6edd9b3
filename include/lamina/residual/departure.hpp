// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lamina/detail/abi.hpp"
#include "lamina/encoder.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/part_encoder.hpp"
#include "lamina/payload.hpp"
#include "lamina/residual.hpp"
#include "lamina/selection.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// What of a step leaves the residual: as one frame, as the frames of its parts, or packed without a frame. A copy has no frames: the
/// original's point into the original.
template <element T>
class departure {
 public:
  departure(const layout& parts, const compressor_options& options)
      : sender_(options.sender),
        payload_(options.payload),
        checksum_(options.frame_checksum),
        frame_(parts, options.run),
        frames_(parts, options.run) {}

  /// The last frame that encode() has made; without bytes where there is none.
  const encoded_frame& frame() const noexcept { return frame_.frame(); }

  /// One frame with all that is chosen, pointing into the residual. Errors as frame_encoder::encode.
  const encoded_frame& encode(std::uint64_t step, const selection& chosen,
                              const residual_accumulator<T>& residual) {
    frame_.encode(
        frame_kind::gradients, step, sender_, chosen, [&](std::size_t part) { return residual[part]; },
        payload_, checksum_);
    frames_.forget();
    left_as_ = left_as::frame;
    return frame();
  }
  /// The next frame of a step in parts. Errors as part_encoder::encode.
  const encoded_frame& encode_part(std::uint64_t step, const selection& chosen, const selection& decided,
                                   bool is_last, const residual_accumulator<T>& residual) {
    const encoded_frame& next = frames_.encode(
        frame_kind::gradients, step, sender_, chosen, decided, is_last,
        [&](std::size_t part) { return residual[part]; }, payload_, checksum_);
    left_as_ = left_as::parts;
    return next;
  }
  /// All that is chosen was written elsewhere, without a frame: as it is, or rounded as the payload says.
  void set_packed(bool is_exact = true) noexcept {
    left_as_ = is_exact ? left_as::packed : left_as::packed_rounded;
  }

  /// There is no frame(). That of parts, and what was packed, stay.
  void forget_frame() noexcept { frame_.forget(); }
  void forget() noexcept {
    frame_.forget();
    frames_.forget();
    left_as_ = left_as::frame;
  }

  /// Whether all that is chosen has left.
  bool is_complete() const noexcept {
    if (left_as_ == left_as::frame) return frame().size_bytes() != 0;
    return is_packed() || frames_.is_complete();
  }
  /// Whether it left without rounding.
  bool is_exact() const noexcept { return left_as_ == left_as::packed || payload_ == payload_type::as_is; }
  /// Calls `use` for each part that has left, with its bytes on the wire, unless it was packed.
  template <class Use>
  void for_each(const selection& chosen, const Use& use) const {
    const auto of_frame = [&](const selection& layers, const encoded_frame& from) {
      std::size_t segment = 0;  // of the frame's header
      for (const std::size_t part : layers.sent()) use(part, from.segments()[++segment].data());
    };
    if (left_as_ == left_as::frame) return of_frame(chosen, frame());
    if (left_as_ == left_as::parts) {
      for (std::size_t k = 0; k < frames_.count(); ++k) of_frame(frames_.layers(k), frames_.frame(k));
      return;
    }
    for (const std::size_t part : chosen.sent()) use(part, nullptr);
  }

 private:
  bool is_packed() const noexcept {
    return left_as_ == left_as::packed || left_as_ == left_as::packed_rounded;
  }

  std::uint32_t sender_;
  payload_type payload_;
  frame_checksum checksum_;
  frame_encoder<T> frame_;
  part_encoder<T> frames_;
  enum class left_as : std::uint8_t { frame, parts, packed, packed_rounded } left_as_ = left_as::frame;
};

}  // namespace lamina::inline LAMINA_ABI::detail
