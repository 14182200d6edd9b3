// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/bounded/grid.hpp"
#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/frame.hpp"
#include "lamina/payload.hpp"
#include "lamina/representative.hpp"
#include "lamina/selection.hpp"

/// A frame as chunks: how it is cut, tagged and ordered; and which chunks were lost how often.
namespace lamina::inline LAMINA_ABI::bounded {

/// What a tag has beside the position: the chunk may be dropped before those that are protected.
inline constexpr std::uint8_t droppable_tag = 4;

/// One chunk of a part.
struct chunk {
  std::uint32_t part = 0;
  std::uint32_t index = 0;
  /// Bits 0 and 1: the quarter of the layout, by elements, in which the part begins, 0 in front; bit 2: droppable_tag.
  std::uint8_t tag = 0;

  friend bool operator==(const chunk&, const chunk&) = default;
};

/// Whether a chunk lies before another in the layout.
[[nodiscard]] constexpr bool lies_before(const chunk& a, const chunk& b) noexcept {
  return a.part != b.part ? a.part < b.part : a.index < b.index;
}

/// What decides in which order the chunks of a frame go out, and what becomes of them in a switch.
struct sending_options {
  /// The bound p, in parts per million, at most half: of c_l chunks of a part, floor(p·c_l) may be missing.
  std::uint32_t bound_ppm = 0;
  /// Whether chunks have tags. Without them no magnitudes are taken, and the chunks of a part go out as they lie.
  bool tags = true;
  /// The share s of chunks that may be dropped first, in parts per million: 1.6 s of a part in the first quarter of the layout, 1.2 s,
  /// 0.8 s and 0.4 s of those behind; of each part those of the smallest magnitude. At most 625,000, so that 1.6 s is all.
  std::uint32_t droppable_ppm = 250'000;
};

/// The chunks of a frame, in the order in which they are to be sent. Points into the frame, which must stay as it is.
///
/// First come the chunks of parts of which nothing may be missing, as they lie: memory is read in a row. All others follow by their
/// quantile within their part: the rank by magnitude, mean |x| over the elements as they are sent, descending, over c_l; ties by part, then by index. It is a total order, so
/// runs repeat. By quantile every part has 1 - p of its chunks sent when 1 - p of the frame is; by the magnitudes themselves a part of
/// small numbers would go last, whole. Required chunks come before all of these: the sender knows them.
///
/// Source: tags by layer and magnitude: Wang et al., Domain-specific Communication Optimization for Distributed DNN Training
/// (arXiv 2008.08445). Cost: c log c for c chunks and one read of what is sent, without tags none.
class frame_chunks {
 public:
  /// \param frame    without a checksum, which would not hold for a frame of which parts are missing
  /// \param sent     the layers in it
  /// \param grid     how it is cut: of its layout, element and payload type
  /// \param options  bound and tags
  /// \throws std::invalid_argument  the frame is not of this selection and grid, has a checksum or is not there; an option outside its
  ///                                range
  frame_chunks(const encoded_frame& frame, const selection& sent, const chunk_grid& grid,
               const sending_options& options = {})
      : sent_(sent),
        grid_(grid),
        bound_ppm_(options.bound_ppm),
        has_tags_(options.tags),
        parts_(grid.fragments().layers()) {
    check_options(options);
    take(frame);
    std::vector<place> order = places(options);
    std::ranges::sort(order, goes_before);
    order_.reserve(order.size());
    for (const place& each : order) order_.push_back(each.which);
  }

  [[nodiscard]] std::span<const chunk> in_sending_order() const& noexcept { return order_; }
  void in_sending_order() const&& = delete;  // it would be gone
  /// The bytes of one chunk of the frame where they lie: one span; of int8 and int4 two, scales and integers.
  [[nodiscard]] std::array<std::span<const std::byte>, 2> bytes_of(const chunk& which) const noexcept {
    const auto pieces = grid_.pieces(which.part, which.index);
    const std::span<const std::byte> part = parts_[which.part];
    return {part.subspan(pieces[0].begin, pieces[0].bytes), part.subspan(pieces[1].begin, pieces[1].bytes)};
  }
  /// The tag of a chunk that is not to be dropped, of any part that is not empty.
  [[nodiscard]] std::uint8_t protected_tag(std::size_t part) const noexcept {
    if (!has_tags_) return 0;
    // What has chunks lies in memory, so that four times as many elements can be counted.
    return static_cast<std::uint8_t>(4 * grid_.fragments().offset(part) / grid_.fragments().elements());
  }
  [[nodiscard]] const selection& sent() const noexcept { return sent_; }
  [[nodiscard]] const chunk_grid& grid() const noexcept { return grid_; }
  [[nodiscard]] std::uint32_t bound_ppm() const noexcept { return bound_ppm_; }
  /// Header and bitmap of the frame.
  [[nodiscard]] std::span<const std::byte> prefix() const noexcept { return prefix_; }
  [[nodiscard]] std::size_t frame_bytes() const noexcept { return frame_bytes_; }

 private:
  struct place {
    chunk which;
    bool can_be_spared = false;
    std::uint32_t rank = 0;  // among the `count` of its part
    std::uint32_t count = 0;
  };

  static bool goes_before(const place& a, const place& b) noexcept {
    if (a.can_be_spared != b.can_be_spared) return b.can_be_spared;
    if (!a.can_be_spared) return lies_before(a.which, b.which);
    // rank / count, exactly.
    const std::uint64_t left = std::uint64_t{a.rank} * b.count;
    const std::uint64_t right = std::uint64_t{b.rank} * a.count;
    return left != right ? left < right : lies_before(a.which, b.which);
  }

  static void check_options(const sending_options& options) {
    using lamina::detail::raise;
    if (options.bound_ppm > most_bound_ppm) {
      raise(std::invalid_argument("a loss bound of " + std::to_string(options.bound_ppm) +
                                  " parts per million: at most half may be missing"));
    }
    if (options.droppable_ppm > 625'000) {
      raise(std::invalid_argument("a droppable share of " + std::to_string(options.droppable_ppm) +
                                  " parts per million: at most 625000, of which 1.6 is all"));
    }
  }

  void take(const encoded_frame& frame) {
    using lamina::detail::raise;
    const auto segments = frame.segments();
    if (segments.empty()) raise(std::invalid_argument("there is no frame"));
    prefix_ = segments.front();
    frame_bytes_ = frame.size_bytes();
    const auto header = lamina::detail::read_header(prefix_);
    if ((header.flags & lamina::detail::flag_checksum) != 0) {
      raise(std::invalid_argument(
          "the frame has a checksum, which would not hold where chunks are missing: encode without one"));
    }
    const auto bitmap =
        prefix_.subspan(lamina::detail::wire_header_bytes, (grid_.fragments().layers() + 7) / 8);
    if (header.fingerprint != grid_.fragments().fingerprint() ||
        sent_.model().fingerprint() != header.fingerprint ||
        !std::ranges::equal(bitmap, std::as_bytes(sent_.bitmap())) ||
        header.payload_type != static_cast<std::uint8_t>(grid_.type()) ||
        (header.element_type == lamina::detail::element_code<double> ? 8U : 4U) != grid_.element_bytes()) {
      raise(std::invalid_argument("the frame is of another layout, selection or type than its chunks"));
    }
    std::size_t segment = 1;
    for (const std::size_t part : sent_.sent()) parts_[part] = segments[segment++];
  }

  std::vector<place> places(const sending_options& options) const {
    std::vector<place> order;
    std::vector<double> magnitudes;
    std::vector<std::uint32_t> ranked;
    for (const std::size_t part : sent_.sent()) {
      const std::uint32_t count = grid_.chunks(part);
      ranked.resize(count);
      for (std::uint32_t i = 0; i < count; ++i) ranked[i] = i;
      std::uint8_t position = 0;
      std::uint32_t droppable = 0;
      if (options.tags) {
        grid_.element_bytes() == sizeof(float) ? measure<float>(part, magnitudes)
                                               : measure<double>(part, magnitudes);
        std::ranges::stable_sort(
            ranked, [&](std::uint32_t a, std::uint32_t b) { return magnitudes[a] > magnitudes[b]; });
        position = protected_tag(part);
        droppable = droppable_of(options.droppable_ppm, position, count);
      }
      const bool can_be_spared = allowed_losses(bound_ppm_, count) > 0;
      for (std::uint32_t rank = 0; rank < count; ++rank) {
        const bool is_droppable = rank >= count - droppable;
        const auto tag = static_cast<std::uint8_t>(position | (is_droppable ? droppable_tag : 0));
        order.push_back({{static_cast<std::uint32_t>(part), ranked[rank], tag}, can_be_spared, rank, count});
      }
    }
    return order;
  }

  static std::uint32_t droppable_of(std::uint32_t share_ppm, std::uint8_t position, std::uint32_t count) {
    constexpr std::array<std::uint64_t, 4> tenths = {16, 12, 8, 4};
    // Below 625,000 · 16 · 2^32 < 2^56.
    return static_cast<std::uint32_t>(share_ppm * tenths[position] * count / 10'000'000);
  }

  // mean |x| of each chunk of a part, as it is sent; NaN counts as infinity.
  template <element T>
  void measure(std::size_t part, std::vector<double>& magnitudes) const {
    std::array<T, lamina::detail::block_elements> buffer;
    const std::size_t elements = grid_.fragments().sizes()[part];
    magnitudes.resize(grid_.chunks(part));
    for (std::uint32_t i = 0; i < magnitudes.size(); ++i) {
      const std::size_t begin = grid_.begin(i);
      const std::size_t end = begin + grid_.elements(part, i);
      double total = 0;
      for (std::size_t at = begin; at < end; at += buffer.size()) {
        const auto block = std::span(buffer).first((std::min)(buffer.size(), end - at));
        lamina::detail::decode_payload<T>(grid_.type(), parts_[part].data(), elements, at, block);
        total += l1_norm{}(block);
      }
      magnitudes[i] = lamina::detail::ordered_value(total / static_cast<double>(end - begin));
    }
  }

  selection sent_;
  chunk_grid grid_;
  std::uint32_t bound_ppm_;
  bool has_tags_;
  std::span<const std::byte> prefix_;
  std::size_t frame_bytes_ = 0;
  std::vector<std::span<const std::byte>> parts_;  // the payload of each; empty: held back
  std::vector<chunk> order_;
};

/// How often in a row each chunk of the model was lost, of one sender and receiver: one byte a chunk. It belongs to the loop that commits,
/// is not saved with the residual, and begins at 0 after a resume.
class loss_memory {
 public:
  explicit loss_memory(const chunk_grid& grid) : grid_(grid) {
    first_.reserve(grid.fragments().layers());
    std::size_t chunks = 0;
    for (std::size_t part = 0; part < grid.fragments().layers(); ++part) {
      first_.push_back(chunks);
      chunks += grid.chunks(part);
    }
    losses_.resize(chunks);
  }

  /// A transfer has ended. Chunks of parts that it did not send stay as they are. Throws std::invalid_argument, and changes nothing, for a
  /// delivery of another layout or chunk size.
  void note(const delivery& arrived) {
    if (arrived.sent().model().fingerprint() != grid_.fragments().fingerprint() ||
        arrived.chunk_elements() != grid_.chunk_elements()) {
      lamina::detail::raise(std::invalid_argument("the delivery is of another layout or chunk size"));
    }
    for (const std::size_t part : arrived.sent().sent()) {
      for (std::uint32_t i = 0; i < grid_.chunks(part); ++i) {
        std::uint8_t& losses = losses_[first_[part] + i];
        if (!arrived.is_lost(part, i)) {
          losses = 0;
        } else if (losses < (std::numeric_limits<std::uint8_t>::max)()) {
          ++losses;
        }
      }
    }
  }

  /// The chunks of the parts sent that were lost in the last `max_losses` transfers of their part, or in more: the next transfer must bring
  /// them. As they lie in the layout. None for max_losses 0; more than 255 counts as 255. Throws std::invalid_argument for a selection
  /// of another layout.
  [[nodiscard]] std::vector<chunk> required(const selection& sent, unsigned max_losses) const {
    if (sent.model().fingerprint() != grid_.fragments().fingerprint())
      lamina::detail::raise(std::invalid_argument("the selection is of another layout"));
    std::vector<chunk> found;
    if (max_losses == 0) return found;
    max_losses = std::min<unsigned>(max_losses, (std::numeric_limits<std::uint8_t>::max)());
    for (const std::size_t part : sent.sent()) {
      for (std::uint32_t i = 0; i < grid_.chunks(part); ++i) {
        if (losses_[first_[part] + i] >= max_losses)
          found.push_back({static_cast<std::uint32_t>(part), i, 0});
      }
    }
    return found;
  }

 private:
  chunk_grid grid_;
  std::vector<std::size_t> first_;  // of each part, among all chunks
  std::vector<std::uint8_t> losses_;
};

}  // namespace lamina::inline LAMINA_ABI::bounded
