// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <system_error>
#include <vector>

#include "lamina/bounded/control.hpp"
#include "lamina/bounded/error.hpp"
#include "lamina/bounded/grid.hpp"
#include "lamina/codec.hpp"
#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/error.hpp"
#include "lamina/frame.hpp"
#include "lamina/selection.hpp"

namespace lamina::inline LAMINA_ABI::bounded {

/// What of a part is missing, from the bitmap of what has arrived: said to a delivery by the same code at both ends.
inline void lose_missing(delivery& arrived, std::size_t part, std::span<const std::byte> received,
                         std::uint32_t chunks) {
  for (std::uint32_t i = 0; i < chunks; ++i) {
    if (!detail::has_bit(received, i)) arrived.lose(part, i);
  }
}

/// What a receiver agrees to.
struct arrival_options {
  frame_kind kind = frame_kind::gradients;  ///< of the frames that come
  std::uint32_t most_bound_ppm = 0;         ///< a sender may ask for less loss, never for more
};

/// The memory of one incoming transfer: the frame, as it fills, the bits of what has come, and how far each part is from its bound. It
/// takes memory in open(), for no more than the prefix and the bytes of the layout, and nowhere else.
class arrivals {
 public:
  arrivals(const chunk_grid& grid, const arrival_options& options)
      : grid_(grid),
        options_(options),
        places_(grid.fragments().layers()),
        states_(grid.fragments().layers()),
        received_(grid.bitmap_bytes()),
        required_(grid.bitmap_bytes()) {}

  /// A transfer begins; what was there before is gone. The prefix is checked as decode() does. Beside its errc: bound_too_large,
  /// has_checksum, wrong_payload_type, and no_such_chunk
  /// for a repair of what is no parameter as_is. After an error nothing is open.
  std::error_code open(const begin_body& begin) {
    missing_ = missing_required_ = beyond_bound_ = 0;
    if (const std::error_code bad = place(begin)) return bad;
    std::ranges::fill(received_, std::byte{0});
    std::ranges::fill(required_, std::byte{0});
    std::error_code bad;
    begin.for_each_required([&](std::uint32_t part, std::uint32_t index) {
      if (places_[part] == nowhere) {
        if (!may_be_repaired()) bad = bounded_errc::no_such_chunk;
        states_[part].is_repaired = true;
        places_[part] = bytes_ = (bytes_ + 7) / 8 * 8;
        bytes_ += grid_.part_bytes(part);
      }
      if (states_[part].is_repaired) ++missing_;
      detail::set_bit(bits_of(required_, grid_, part), index);
      ++missing_required_;
    });
    if (bad) return bad;
    take_memory(begin.prefix);
    arrived_.emplace(selection_of(begin.prefix), grid_.chunk_elements());
    for (const std::size_t part : arrived_->sent().sent()) {
      part_state& state = states_[part];
      state.missing = grid_.chunks(part);
      state.allowed = allowed_losses(begin.bound_ppm, state.missing);
      missing_ += state.missing;
      beyond_bound_ += state.missing > state.allowed ? 1 : 0;
    }
    return {};
  }

  /// Whether the chunk, which the grid has, is one of this transfer.
  [[nodiscard]] bool expects(std::uint32_t part, std::uint32_t index) const noexcept {
    return is_in_frame(part) || detail::has_bit(bits_of(required_, grid_, part), index);
  }
  [[nodiscard]] bool is_in_frame(std::uint32_t part) const noexcept {
    return places_[part] != nowhere && !states_[part].is_repaired;
  }
  /// Copies a chunk that is expected to its place, if it has not come before: whether it had not.
  bool place(std::uint32_t part, std::uint32_t index, std::span<const std::byte> data) noexcept {
    const auto bits = bits_of(received_, grid_, part);
    if (detail::has_bit(bits, index)) return false;
    detail::set_bit(bits, index);
    for (const auto piece : grid_.pieces(part, index)) {
      if (piece.bytes > 0) std::memcpy(at(part) + piece.begin, data.data(), piece.bytes);
      data = data.subspan(piece.bytes);
    }
    --missing_;
    if (detail::has_bit(bits_of(required_, grid_, part), index)) --missing_required_;
    part_state& state = states_[part];
    if (!state.is_repaired && state.missing-- == state.allowed + std::uint64_t{1}) --beyond_bound_;
    return true;
  }

  [[nodiscard]] bool is_complete() const noexcept { return missing_ == 0; }
  /// Whether each part misses no more than its bound allows, and nothing required is missing.
  [[nodiscard]] bool is_within_bound() const noexcept { return beyond_bound_ == 0 && missing_required_ == 0; }

  /// Zeroes the holes, and says to arrived() what is missing. Nothing is to be placed after it.
  void freeze() {
    for (const std::size_t part : arrived_->sent().sent()) {
      if (states_[part].missing == 0) continue;
      const auto bits = bits_of(received_, grid_, part);
      const std::uint32_t chunks = grid_.chunks(part);
      for (std::uint32_t i = 0; i < chunks; ++i) {
        if (detail::has_bit(bits, i)) continue;
        for (const auto piece : grid_.pieces(part, i)) std::memset(at(part) + piece.begin, 0, piece.bytes);
      }
      lose_missing(*arrived_, part, bits, chunks);
    }
  }

  /// The list of a WANTED: all missing chunks of every part beyond its bound, and required ones that are missing.
  void write_wanted(control_writer& to) const {
    const auto is_listed = [&](std::size_t part) {
      if (is_beyond(part)) return true;
      const auto required = bits_of(required_, grid_, part);
      const auto received = bits_of(received_, grid_, part);
      for (std::size_t i = 0; i < required.size(); ++i) {
        if ((required[i] & ~received[i]) != std::byte{0}) return true;
      }
      return false;
    };
    write_list(to, is_listed, [&](std::size_t part, std::size_t i) {
      const auto missing = ~bits_of(received_, grid_, part)[i];
      return missing & (is_beyond(part) ? chunk_mask(part, i) : bits_of(required_, grid_, part)[i]);
    });
  }
  /// The list of a STOP: of each part that misses chunks, those that have arrived.
  void write_received(control_writer& to) const {
    write_list(
        to, [&](std::size_t part) { return states_[part].missing > 0; },
        [&](std::size_t part, std::size_t i) { return bits_of(received_, grid_, part)[i]; });
  }

  /// What the last transfer that was opened brought, once it is frozen.
  [[nodiscard]] const delivery& arrived() const noexcept { return *arrived_; }
  /// Prefix and payload, holes being zeros.
  [[nodiscard]] std::span<const std::byte> frame() const noexcept { return {buffer_.get(), frame_bytes_}; }
  /// consume(part, begin, bytes) for each run of elements that was repaired, from element `begin` on.
  template <class Consume>
  void for_each_repair(Consume&& consume) const {
    for (std::size_t part = 0; part < states_.size(); ++part) {
      if (!states_[part].is_repaired) continue;
      for (std::uint32_t i = 0; i < grid_.chunks(part); ++i) {
        if (!detail::has_bit(bits_of(required_, grid_, part), i)) continue;
        const auto piece = grid_.pieces(part, i)[0];
        consume(part, grid_.begin(i), std::span<const std::byte>(at(part) + piece.begin, piece.bytes));
      }
    }
  }

 private:
  static constexpr std::size_t nowhere = static_cast<std::size_t>(-1);

  struct part_state {
    std::uint32_t missing = 0;  // of a part in the frame
    std::uint32_t allowed = 0;
    bool is_repaired = false;  // not in the frame
  };

  // The checks of decode() that the prefix alone allows, and where each part of the frame will lie.
  std::error_code place(const begin_body& begin) {
    std::ranges::fill(places_, nowhere);
    std::ranges::fill(states_, part_state{});
    const layout& parts = grid_.fragments();
    if (begin.bound_ppm > options_.most_bound_ppm) return bounded_errc::bound_too_large;
    std::error_code error;
    const frame_info info = peek(begin.prefix, error);
    if (error) return error;
    if (info.kind != options_.kind || begin.kind != options_.kind) return errc::unexpected_kind;
    if (info.sequence != 0 || !info.is_last) return errc::unexpected_sequence;
    if (info.element_bytes != grid_.element_bytes()) return errc::wrong_element_type;
    if (info.payload != grid_.type()) return bounded_errc::wrong_payload_type;
    if (info.fingerprint != parts.fingerprint() || info.layers != parts.layers()) return errc::wrong_layout;
    const auto header = lamina::detail::read_header(begin.prefix);
    if ((header.flags & lamina::detail::flag_checksum) != 0) return bounded_errc::has_checksum;
    if (header.checksum != 0) return errc::checksum_mismatch;
    const std::size_t prefix_bytes =
        lamina::detail::wire_header_bytes +
        lamina::detail::padded_bitmap_bytes(parts.layers(), std::size_t{header.user_bytes});
    if (begin.prefix.size() != prefix_bytes) {
      return begin.prefix.size() < prefix_bytes ? errc::truncated : errc::trailing_bytes;
    }
    const auto bitmap =
        begin.prefix.subspan(lamina::detail::wire_header_bytes, lamina::detail::bitmap_bytes(parts.layers()));
    for (const std::byte each :
         begin.prefix.subspan(lamina::detail::wire_header_bytes + bitmap.size() + header.user_bytes)) {
      if (each != std::byte{0}) return errc::bad_presence;
    }
    bytes_ = prefix_bytes;
    for (std::size_t bit = 0; bit < 8 * bitmap.size(); ++bit) {
      if (!detail::has_bit(bitmap, bit)) continue;
      if (bit >= parts.layers() || parts.sizes()[bit] == 0) return errc::bad_presence;
      places_[bit] = bytes_;
      bytes_ += grid_.part_bytes(bit);
    }
    frame_bytes_ = bytes_;
    if (info.size_bytes != bytes_ || begin.frame_bytes != bytes_) return errc::bad_payload_size;
    return {};
  }

  selection selection_of(std::span<const std::byte> prefix) const {
    selection sent(grid_.fragments());
    const auto bitmap = prefix.subspan(lamina::detail::wire_header_bytes);
    for (std::size_t part = 0; part < grid_.fragments().layers(); ++part) {
      if (detail::has_bit(bitmap, part)) sent.send(part);
    }
    return sent;
  }

  // What a gradient lost is in the residual of its sender. One piece of bytes a chunk, too.
  [[nodiscard]] bool may_be_repaired() const noexcept {
    return options_.kind == frame_kind::parameters && grid_.type() == payload_type::as_is;
  }

  // Not filled: what does not arrive is zeroed by freeze().
  void take_memory(std::span<const std::byte> prefix) {
    if (capacity_ < bytes_) {
      buffer_.reset();  // so that there are never two
      capacity_ = 0;
      buffer_ = std::make_unique_for_overwrite<std::byte[]>(bytes_);
      capacity_ = bytes_;
    }
    std::memcpy(buffer_.get(), prefix.data(), prefix.size());
  }

  [[nodiscard]] std::byte* at(std::size_t part) const noexcept { return buffer_.get() + places_[part]; }
  [[nodiscard]] bool is_beyond(std::size_t part) const noexcept {
    return states_[part].missing > states_[part].allowed;
  }
  // Without the bits from c_l on.
  [[nodiscard]] std::byte chunk_mask(std::size_t part, std::size_t byte) const noexcept {
    const std::size_t rest = grid_.chunks(part) - 8 * byte;
    return rest >= 8 ? std::byte{0xff} : static_cast<std::byte>((1U << rest) - 1U);
  }

  template <class IsListed, class ByteOf>
  void write_list(control_writer& to, const IsListed& is_listed, const ByteOf& byte_of) const {
    std::uint32_t listed = 0;
    for (std::size_t part = 0; part < states_.size(); ++part) listed += is_listed(part) ? 1 : 0;
    to.put(listed);
    for (std::size_t part = 0; part < states_.size(); ++part) {
      if (!is_listed(part)) continue;
      to.put(static_cast<std::uint32_t>(part));
      for (std::size_t i = 0; i < grid_.bitmap_bytes(part); ++i) {
        const std::byte bits = byte_of(part, i);
        to.put(std::span(&bits, 1));
      }
    }
  }

  chunk_grid grid_;
  arrival_options options_;
  std::vector<std::size_t> places_;  // of each part in the buffer, or nowhere
  std::vector<part_state> states_;
  std::vector<std::byte> received_;  // bitmaps of the grid
  std::vector<std::byte> required_;
  std::size_t missing_ = 0;  // chunks, repairs included
  std::size_t missing_required_ = 0;
  std::size_t beyond_bound_ = 0;  // parts
  std::unique_ptr<std::byte[]> buffer_;
  std::size_t capacity_ = 0;
  std::size_t bytes_ = 0;
  std::size_t frame_bytes_ = 0;
  std::optional<delivery> arrived_;
};

}  // namespace lamina::inline LAMINA_ABI::bounded
