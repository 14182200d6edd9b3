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

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/tensor.hpp"

/// A *transfer* moves one frame from one rank to another. A *part* is a layer of the frame, and a *chunk* what one packet carries of
/// it: a range of elements, never of bytes, or a chunk of integers could arrive without its scale.
namespace lamina::inline LAMINA_ABI::bounded {

/// The largest bound there is, in parts per million: half of each part.
inline constexpr std::uint32_t most_bound_ppm = 500'000;

/// How many chunks of a part of so many may be missing: the bound's share, rounded down. In integers, since both ends must get the same
/// number, and in doubles floor(0.29 · 100) is 28.
[[nodiscard]] constexpr std::uint32_t allowed_losses(std::uint32_t bound_ppm, std::uint32_t chunks) noexcept {
  return static_cast<std::uint32_t>(std::uint64_t{bound_ppm} * chunks / 1'000'000);
}

/// Elements of a chunk: as many as fit into `data_bytes`, a multiple of 8, and of 64 in int8 and int4, whose blocks share a scale. Throws
/// std::invalid_argument where not even these fit.
template <element T>
[[nodiscard]] constexpr std::size_t chunk_elements(payload_type type, std::size_t data_bytes) {
  const std::size_t unit = has_blocks(type) ? payload_block_elements : 8;
  const std::size_t units = data_bytes / payload_bytes<T>(type, unit);
  if (units == 0) {
    lamina::detail::raise(std::invalid_argument(std::to_string(data_bytes) +
                                                " bytes of data a packet: not even " + std::to_string(unit) +
                                                " elements fit"));
  }
  return units * unit;
}

/// Where chunks lie: how the parts of a model are cut when they go out in one payload type. Both ends of a transfer build the same.
///
/// Bitmaps of chunks have a byte's beginning for each part, so that they lie in memory as they go over the wire: chunk i of a part is
/// bit i mod 8 of byte i / 8 of the part's bytes, counted from the least significant.
class chunk_grid {
 public:
  /// Bytes of one chunk within the payload of its part: one range, and of int8 and int4 two, scales and integers.
  struct piece {
    std::size_t begin = 0;
    std::size_t bytes = 0;
  };

  /// \param parts           the layout of the frames: worker::fragments() where layers are cut
  /// \param element_bytes   4: float, 8: double
  /// \param type            how the elements are written
  /// \param chunk_elements  see chunk_elements()
  /// \throws std::invalid_argument  a chunk that is no multiple of 8 elements, or of 64 in int8 and int4, or larger than a datagram; a
  ///                                part of more than 2^32 - 1 chunks; more than 2^32 - 1 parts
  chunk_grid(const layout& parts, std::size_t element_bytes, payload_type type, std::size_t chunk_elements)
      : parts_(parts), type_(type), element_bytes_(element_bytes), chunk_elements_(chunk_elements) {
    check_sizes();
    bitmap_begins_.reserve(parts.layers() + 1);
    bitmap_begins_.push_back(0);
    for (std::size_t l = 0; l < parts.layers(); ++l) {
      chunks_ += chunks(l);
      bitmap_begins_.push_back(bitmap_begins_.back() + (chunks(l) + std::size_t{7}) / 8);
    }
  }
  /// The same, of elements of T.
  template <element T>
  [[nodiscard]] static chunk_grid of(const layout& parts, payload_type type, std::size_t chunk_elements) {
    return chunk_grid(parts, sizeof(T), type, chunk_elements);
  }

  /// Whether both cut alike: the same layout, types and chunk size.
  friend bool operator==(const chunk_grid& a, const chunk_grid& b) noexcept {
    return a.parts_.fingerprint() == b.parts_.fingerprint() && a.type_ == b.type_ &&
           a.element_bytes_ == b.element_bytes_ && a.chunk_elements_ == b.chunk_elements_;
  }

  [[nodiscard]] const layout& fragments() const noexcept { return parts_; }
  [[nodiscard]] payload_type type() const noexcept { return type_; }
  [[nodiscard]] std::size_t element_bytes() const noexcept { return element_bytes_; }
  [[nodiscard]] std::size_t chunk_elements() const noexcept { return chunk_elements_; }

  // None of these looks at its index: it comes from the grid, or was checked by has().
  [[nodiscard]] bool has(std::uint32_t part, std::uint32_t index) const noexcept {
    return part < parts_.layers() && index < chunks(part);
  }
  /// c_l, the chunks of a part; 0 of an empty one.
  [[nodiscard]] std::uint32_t chunks(std::size_t part) const noexcept {
    const std::size_t elements = parts_.sizes()[part];
    return static_cast<std::uint32_t>(elements / chunk_elements_ + (elements % chunk_elements_ != 0));
  }
  /// Of all parts.
  [[nodiscard]] std::size_t chunks() const noexcept { return chunks_; }
  [[nodiscard]] std::size_t elements(std::size_t part, std::uint32_t index) const noexcept {
    return (std::min)(chunk_elements_, parts_.sizes()[part] - begin(index));
  }
  /// The first element of a chunk.
  [[nodiscard]] std::size_t begin(std::uint32_t index) const noexcept { return index * chunk_elements_; }
  /// Bytes of a whole part, and of one chunk, on the wire.
  [[nodiscard]] std::size_t part_bytes(std::size_t part) const noexcept {
    return bytes_of(parts_.sizes()[part]);
  }
  [[nodiscard]] std::size_t data_bytes(std::size_t part, std::uint32_t index) const noexcept {
    return bytes_of(elements(part, index));
  }
  [[nodiscard]] std::array<piece, 2> pieces(std::size_t part, std::uint32_t index) const noexcept {
    const std::size_t count = elements(part, index);
    if (!has_blocks(type_)) return {{{bytes_of(begin(index)), bytes_of(count)}, {}}};
    const std::size_t scales = payload_blocks(count);
    const std::size_t before = payload_blocks(begin(index));
    return {
        {{before, scales},
         {payload_blocks(parts_.sizes()[part]) + bytes_of(begin(index)) - before, bytes_of(count) - scales}}};
  }

  /// Bytes of a bitmap of all chunks, and the place in it of a part's bytes.
  [[nodiscard]] std::size_t bitmap_bytes() const noexcept { return bitmap_begins_.back(); }
  [[nodiscard]] std::size_t bitmap_begin(std::size_t part) const noexcept { return bitmap_begins_[part]; }
  [[nodiscard]] std::size_t bitmap_bytes(std::size_t part) const noexcept {
    return bitmap_begins_[part + 1] - bitmap_begins_[part];
  }

 private:
  [[nodiscard]] std::size_t bytes_of(std::size_t elements) const noexcept {
    return element_bytes_ == sizeof(float) ? payload_bytes<float>(type_, elements)
                                           : payload_bytes<double>(type_, elements);
  }

  void check_sizes() const {
    using lamina::detail::raise;
    if (element_bytes_ != sizeof(float) && element_bytes_ != sizeof(double)) {
      raise(std::invalid_argument("elements of " + std::to_string(element_bytes_) +
                                  " bytes: neither float nor double"));
    }
    const std::size_t unit = has_blocks(type_) ? payload_block_elements : 8;
    if (chunk_elements_ == 0 || chunk_elements_ % unit != 0) {
      raise(std::invalid_argument("chunks of " + std::to_string(chunk_elements_) +
                                  " elements: must be a multiple of " + std::to_string(unit)));
    }
    if (chunk_elements_ > most_datagram_bytes || bytes_of(chunk_elements_) > most_datagram_bytes) {
      raise(std::invalid_argument("chunks of " + std::to_string(chunk_elements_) +
                                  " elements: larger than a datagram"));
    }
    constexpr std::size_t most = (std::numeric_limits<std::uint32_t>::max)();
    if (parts_.layers() > most) raise(std::invalid_argument("more than 2^32 - 1 parts"));
    for (std::size_t l = 0; l < parts_.layers(); ++l) {
      if (parts_.sizes()[l] / chunk_elements_ >= most) {
        raise(std::invalid_argument("layer '" + parts_[l].name + "' has more than 2^32 - 1 chunks"));
      }
    }
    // No chunk is larger than a datagram, so that the bytes of a part can be counted; those of all have room for a frame's header.
    std::size_t bytes = (std::numeric_limits<std::size_t>::max)() / 2;
    for (std::size_t l = 0; l < parts_.layers(); ++l) {
      if (part_bytes(l) > bytes) raise(std::invalid_argument("the bytes of the layout cannot be counted"));
      bytes -= part_bytes(l);
    }
  }

  static constexpr std::size_t most_datagram_bytes =
      65'507 - 56;  // of UDP over IPv4, without a packet's header

  layout parts_;
  payload_type type_;
  std::size_t element_bytes_;
  std::size_t chunk_elements_;
  std::size_t chunks_ = 0;
  std::vector<std::size_t> bitmap_begins_;
};

namespace detail {

[[nodiscard]] inline bool has_bit(std::span<const std::byte> bits, std::size_t index) noexcept {
  return ((bits[index / 8] >> (index % 8)) & std::byte{1}) != std::byte{0};
}
inline void set_bit(std::span<std::byte> bits, std::size_t index) noexcept {
  bits[index / 8] |= std::byte{1} << (index % 8);
}
inline void clear_bit(std::span<std::byte> bits, std::size_t index) noexcept {
  bits[index / 8] &= ~(std::byte{1} << (index % 8));
}

}  // namespace detail

/// The bytes of one part in a bitmap of all chunks.
[[nodiscard]] inline std::span<std::byte> bits_of(std::vector<std::byte>& all, const chunk_grid& grid,
                                                  std::size_t part) noexcept {
  return std::span(all).subspan(grid.bitmap_begin(part), grid.bitmap_bytes(part));
}
[[nodiscard]] inline std::span<const std::byte> bits_of(const std::vector<std::byte>& all,
                                                        const chunk_grid& grid, std::size_t part) noexcept {
  return std::span(all).subspan(grid.bitmap_begin(part), grid.bitmap_bytes(part));
}

}  // namespace lamina::inline LAMINA_ABI::bounded
