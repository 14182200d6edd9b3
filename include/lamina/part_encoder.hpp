// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <stdexcept>
#include <string>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/encoder.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/selection.hpp"

namespace lamina::inline LAMINA_ABI {

/// Builds the frames of a step that goes out in parts, as layers are decided. All frames of a step stay valid until the next
/// step's first, so that several can be under way. Memory: for each part of the step with most of them O(L), and with a payload
/// other than as_is the bytes of its largest frame.
template <element T>
class part_encoder {
 public:
  /// \param model  what the frames are of
  /// \param run    as of frame_encoder
  explicit part_encoder(const layout& model, std::uint32_t run = 0)
      : model_(model), run_(run), sent_(model) {}
  /// A copy has no frames yet: the original's point into the original.
  part_encoder(const part_encoder& other) : part_encoder(other.model_, other.run_) {}
  part_encoder& operator=(const part_encoder& other) {
    if (this != &other) *this = part_encoder(other);
    return *this;
  }
  part_encoder(part_encoder&&) noexcept = default;
  part_encoder& operator=(part_encoder&&) noexcept = default;
  ~part_encoder() = default;

  /// The next part: the layers that are chosen and decided and were in no part of this step. After the last part, and in another
  /// step, begins with part 0 again. On an error the parts so far stay as they are, unless the step was to begin again.
  /// `decided` has the layers that are decided, those of the parts before among them; with the last part, which ends the step
  /// (`is_last`), all are. The frame is valid until the first part of the next step. Throws std::length_error for part 65,536, and as
  /// frame_encoder::encode, which says what else is given. Cost: as there.
  template <class LayerElements>
  const encoded_frame& encode(frame_kind kind, std::uint64_t step, std::uint32_t sender,
                              const selection& chosen, const selection& decided, bool is_last,
                              LayerElements&& layer_elements, payload_type type = payload_type::as_is,
                              frame_checksum checksum = frame_checksum::xxh3) {
    if (is_complete_ || step != step_) begin(step);
    if (count_ > (std::numeric_limits<std::uint16_t>::max)()) {
      detail::raise(std::length_error("step " + std::to_string(step) + " has " + std::to_string(count_) +
                                      " parts, and may not have more"));
    }
    if (count_ == parts_.size()) parts_.emplace_back(model_, run_);
    part& next = parts_[count_];
    next.layers.clear();
    for (const std::size_t l : chosen.sent()) {
      if (decided.is_sent(l) && !sent_.is_sent(l)) next.layers.send(l);
    }
    const frame_part place{static_cast<std::uint16_t>(count_), is_last, &decided};
    next.encoder.encode(kind, step, sender, next.layers, layer_elements, type, checksum, place);
    for (const std::size_t l : next.layers.sent()) sent_.send(l);
    ++count_;
    is_complete_ = is_last;
    return next.encoder.frame();
  }

  /// The parts of the step so far.
  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  /// Whether the last is among them.
  [[nodiscard]] bool is_complete() const noexcept { return is_complete_; }
  /// The layers in a part, and its frame. Throws std::out_of_range for one that the step does not have.
  [[nodiscard]] const selection& layers(std::size_t index) const { return at(index).layers; }
  [[nodiscard]] const encoded_frame& frame(std::size_t index) const { return at(index).encoder.frame(); }

  /// There are no parts any more.
  void forget() noexcept { begin(0); }

 private:
  struct part {
    part(const layout& model, std::uint32_t run) : layers(model), encoder(model, run) {}
    selection layers;
    frame_encoder<T> encoder;
  };

  void begin(std::uint64_t step) noexcept {
    step_ = step;
    count_ = 0;
    is_complete_ = false;
    sent_.clear();
  }

  const part& at(std::size_t index) const {
    if (index >= count_) {
      detail::raise(std::out_of_range("part " + std::to_string(index) + " of a step that has " +
                                      std::to_string(count_)));
    }
    return parts_[index];
  }

  layout model_;
  std::uint32_t run_ = 0;
  std::deque<part>
      parts_;  // those of the step, and of the longest before it; never moved, frames stay where they are
  selection sent_;  // in the parts so far
  std::uint64_t step_ = 0;
  std::size_t count_ = 0;
  bool is_complete_ = false;
};

}  // namespace lamina::inline LAMINA_ABI
