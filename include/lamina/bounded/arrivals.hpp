// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/bounded/control.hpp"
#include "lamina/codec.hpp"

namespace lamina::inline LAMINA_ABI::bounded {

/// The memory of one incoming transfer: the frame, as it fills, the bits of what has come, and how far each fragment is from its bound. It
/// takes memory in open(), for no more than the prefix and the bytes of the layout, and nowhere else.
class arrivals {
 public:
  /// \param grid       of the transfer
  /// \param kind       of the frames that come
  /// \param bound_ppm  the largest: a sender may ask for less loss, never for more
  arrivals(const chunk_grid& grid, frame_kind kind, std::uint32_t bound_ppm)
      : grid_(grid),
        kind_(kind),
        most_bound_ppm_(bound_ppm),
        states_(grid.fragments().layers()),
        received_(grid),
        required_(grid) {}

  /// A transfer begins; what was there before is gone. The prefix is checked as decode() does. Its other errors: bound_too_large,
  /// has_checksum, wrong_payload_type, and no_such_chunk for a repair of what is no parameter as_is. After an error nothing is open.
  std::error_code open(const begin_body& begin) {
    missing_ = missing_required_ = beyond_bound_ = 0;
    if (const std::error_code bad = place(begin)) return bad;
    received_.fill(std::byte{0});
    required_.fill(std::byte{0});
    std::size_t bytes = frame_bytes_;
    std::error_code bad;
    begin.for_each_required([&](std::uint32_t fragment, std::uint32_t index) {
      fragment_state& state = states_[fragment];
      if (state.place == nowhere) {
        // What a gradient lost is in the residual of its sender.
        if (kind_ != frame_kind::parameters || grid_.type() != payload_type::as_is) bad = errc::no_such_chunk;
        state.is_repaired = true;
        state.place = bytes = (bytes + 7) / 8 * 8;
        bytes += grid_.fragment_bytes(fragment);
      }
      if (state.is_repaired) ++missing_;
      required_.add(fragment, index);
      ++missing_required_;
    });
    if (bad) return bad;
    if (buffer_.size() < bytes) {
      buffer_ = std::vector<std::byte>();  // so that there are never two
      buffer_.resize(bytes);
    }
    std::memcpy(buffer_.data(), begin.prefix.data(), begin.prefix.size());
    selection sent(grid_.fragments());
    for (std::size_t fragment = 0; fragment < states_.size(); ++fragment)
      if (states_[fragment].missing > 0) sent.send(fragment);
    arrived_.emplace(sent, grid_.chunk_elements());
    return {};
  }

  /// Whether the chunk, which the grid has, is one of the frame, or one of its repairs.
  [[nodiscard]] bool expects(std::uint32_t fragment, std::uint32_t index, bool is_repair) const noexcept {
    if (is_repair) return states_[fragment].is_repaired && required_.has(fragment, index);
    return states_[fragment].place != nowhere && !states_[fragment].is_repaired;
  }
  /// Copies a chunk that is expected to its place, if it has not come before: whether it had not.
  bool place(std::uint32_t fragment, std::uint32_t index, std::span<const std::byte> data) noexcept {
    if (received_.has(fragment, index)) return false;
    received_.add(fragment, index);
    for (const auto piece : grid_.pieces(fragment, index)) {
      std::ranges::copy(data.first(piece.bytes), bytes_of(fragment, piece).begin());
      data = data.subspan(piece.bytes);
    }
    --missing_;
    if (required_.has(fragment, index)) --missing_required_;
    fragment_state& state = states_[fragment];
    if (!state.is_repaired && state.missing-- == state.allowed + std::uint64_t{1}) --beyond_bound_;
    return true;
  }

  [[nodiscard]] bool is_complete() const noexcept { return missing_ == 0; }
  /// Whether each fragment misses no more than its bound allows, and nothing required is missing.
  [[nodiscard]] bool is_within_bound() const noexcept { return beyond_bound_ == 0 && missing_required_ == 0; }

  /// Zeroes the holes, and says to arrived() what is missing. Nothing is to be placed after it.
  void freeze() {
    for (const std::size_t fragment : arrived_->sent().sent()) {
      if (states_[fragment].missing == 0) continue;
      for (std::uint32_t i = 0; i < grid_.chunks(fragment); ++i) {
        if (received_.has(fragment, i)) continue;
        for (const auto piece : grid_.pieces(fragment, i))
          std::ranges::fill(bytes_of(fragment, piece), std::byte{0});
        arrived_->lose(fragment, i);
      }
    }
  }

  /// The list of a WANTED: all missing chunks of every fragment beyond its bound, and required ones that are missing.
  void write_wanted(control_writer& to) const {
    const auto is_listed = [&](std::size_t fragment) {
      return is_beyond(fragment) || !detail::has_all(received_.bits(fragment), required_.bits(fragment));
    };
    write_list(to, is_listed, [&](std::size_t fragment, std::size_t i) {
      const auto missing = ~received_.bits(fragment)[i];
      return missing & (is_beyond(fragment) ? chunk_mask(fragment, i) : required_.bits(fragment)[i]);
    });
  }
  /// The list of a STOP: of each fragment that misses chunks, those that have arrived.
  void write_received(control_writer& to) const {
    write_list(
        to, [&](std::size_t fragment) { return states_[fragment].missing > 0; },
        [&](std::size_t fragment, std::size_t i) { return received_.bits(fragment)[i]; });
  }

  /// What the last transfer that was opened brought, once it is frozen.
  [[nodiscard]] const delivery& arrived() const noexcept { return *arrived_; }
  /// Prefix and payload, holes being zeros.
  [[nodiscard]] std::span<const std::byte> frame() const noexcept { return {buffer_.data(), frame_bytes_}; }
  /// What came of layers that are not in the frame, a chunk each.
  [[nodiscard]] std::vector<repair> repairs() const {
    std::vector<repair> all;
    for (std::size_t fragment = 0; fragment < states_.size(); ++fragment) {
      if (!states_[fragment].is_repaired) continue;
      for (std::uint32_t i = 0; i < grid_.chunks(fragment); ++i) {
        if (!required_.has(fragment, i)) continue;
        const auto piece = grid_.pieces(fragment, i)[0];
        const auto elements = std::span(buffer_).subspan(states_[fragment].place + piece.begin, piece.bytes);
        all.push_back({fragment, grid_.begin(i), elements});
      }
    }
    return all;
  }

 private:
  static constexpr std::size_t nowhere = static_cast<std::size_t>(-1);

  struct fragment_state {
    std::size_t place = nowhere;  // in the buffer
    std::uint32_t missing = 0;    // of a fragment in the frame
    std::uint32_t allowed = 0;
    bool is_repaired = false;  // not in the frame
  };

  // The checks of decode() that the prefix alone allows, and where each fragment of the frame will lie.
  std::error_code place(const begin_body& begin) {
    std::ranges::fill(states_, fragment_state{});
    const layout& fragments = grid_.fragments();
    if (begin.bound_ppm > most_bound_ppm_) return errc::bound_too_large;
    std::error_code error;
    const frame_info info = peek(begin.prefix, error);
    if (error) return error;
    if (info.kind != kind_) return errc::unexpected_kind;
    if (info.sequence != 0 || !info.is_last) return errc::unexpected_sequence;
    if (info.element_bytes != grid_.element_bytes()) return errc::wrong_element_type;
    if (info.payload != grid_.type()) return errc::wrong_payload_type;
    if (info.fingerprint != fragments.fingerprint() || info.layers != fragments.layers())
      return errc::wrong_layout;
    const auto header = lamina::detail::read_header(begin.prefix);
    if ((header.flags & lamina::detail::flag_checksum) != 0) return errc::has_checksum;
    if (header.checksum != 0) return errc::checksum_mismatch;
    const std::size_t prefix_bytes =
        lamina::detail::wire_header_bytes +
        lamina::detail::padded_bitmap_bytes(fragments.layers(), std::size_t{header.user_bytes});
    if (begin.prefix.size() != prefix_bytes)
      return begin.prefix.size() < prefix_bytes ? errc::truncated : errc::trailing_bytes;
    const auto bitmap = begin.prefix.subspan(lamina::detail::wire_header_bytes,
                                             lamina::detail::bitmap_bytes(fragments.layers()));
    const auto padding = begin.prefix.last(prefix_bytes - lamina::detail::wire_header_bytes - bitmap.size() -
                                           header.user_bytes);
    if (std::ranges::any_of(padding, [](std::byte each) { return each != std::byte{0}; }))
      return errc::bad_presence;
    frame_bytes_ = prefix_bytes;
    for (std::size_t bit = 0; bit < 8 * bitmap.size(); ++bit) {
      if (!detail::has_bit(bitmap, bit)) continue;
      if (bit >= fragments.layers() || fragments.sizes()[bit] == 0) return errc::bad_presence;
      const std::uint32_t chunks = grid_.chunks(bit);
      states_[bit] = {frame_bytes_, chunks, allowed_losses(begin.bound_ppm, chunks)};
      frame_bytes_ += grid_.fragment_bytes(bit);
      missing_ += chunks;
      ++beyond_bound_;  // no bound lets all be missing
    }
    if (info.size_bytes != frame_bytes_) return errc::bad_payload_size;
    return {};
  }

  std::span<std::byte> bytes_of(std::size_t fragment, const chunk_grid::piece& piece) noexcept {
    return std::span(buffer_).subspan(states_[fragment].place + piece.begin, piece.bytes);
  }
  [[nodiscard]] bool is_beyond(std::size_t fragment) const noexcept {
    return states_[fragment].missing > states_[fragment].allowed;
  }
  // Without the bits from c_l on.
  [[nodiscard]] std::byte chunk_mask(std::size_t fragment, std::size_t byte) const noexcept {
    const std::size_t rest = grid_.chunks(fragment) - 8 * byte;
    return rest >= 8 ? std::byte{0xff} : static_cast<std::byte>((1U << rest) - 1U);
  }

  template <class IsListed, class ByteOf>
  void write_list(control_writer& to, const IsListed& is_listed, const ByteOf& byte_of) const {
    std::uint32_t listed = 0;
    for (std::size_t fragment = 0; fragment < states_.size(); ++fragment)
      listed += is_listed(fragment) ? 1 : 0;
    to.put(listed);
    for (std::size_t fragment = 0; fragment < states_.size(); ++fragment) {
      if (!is_listed(fragment)) continue;
      to.put(static_cast<std::uint32_t>(fragment));
      for (std::size_t i = 0; i < grid_.bitmap_bytes(fragment); ++i) {
        const std::byte bits = byte_of(fragment, i);
        to.put(std::span(&bits, 1));
      }
    }
  }

  chunk_grid grid_;
  frame_kind kind_;
  std::uint32_t most_bound_ppm_;
  std::vector<fragment_state> states_;
  detail::chunk_set received_;
  detail::chunk_set required_;
  std::size_t missing_ = 0;  // chunks, repairs included
  std::size_t missing_required_ = 0;
  std::size_t beyond_bound_ = 0;  // fragments
  std::vector<std::byte> buffer_;
  std::size_t frame_bytes_ = 0;
  std::optional<delivery> arrived_;
};

}  // namespace lamina::inline LAMINA_ABI::bounded
