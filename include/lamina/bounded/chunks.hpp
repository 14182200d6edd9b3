// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/frame.hpp"
#include "lamina/representative.hpp"

/// A *transfer* moves one frame from one rank to another. A *fragment* is a layer of the frame, and a *chunk* what one packet carries of
/// it: a range of elements, never of bytes, or a chunk of integers could arrive without its scale. Here is how a frame is cut into chunks,
/// in which order they are sent, and how often each was lost.
namespace lamina::inline LAMINA_ABI::bounded {

/// The largest bound there is, in parts per million: half of each fragment.
inline constexpr std::uint32_t most_bound_ppm = 500'000;

/// How many of the chunks of a fragment may be missing: the bound's share, rounded down. In integers, since both ends must get the same
/// number, and in doubles floor(0.29 · 100) is 28.
[[nodiscard]] constexpr std::uint32_t allowed_losses(std::uint32_t bound_ppm, std::uint32_t chunks) noexcept {
  return static_cast<std::uint32_t>(std::uint64_t{bound_ppm} * chunks / 1'000'000);
}

/// Elements that are not cut apart: int8, int4 and ternary have a scale for each block.
[[nodiscard]] constexpr std::size_t chunk_unit(payload_type type) noexcept {
  return has_blocks(type) ? payload_block_elements : 8;
}

/// Elements of a chunk: as many as fit into `data_bytes`, a multiple of 8, and of 64 in int8, int4 and ternary. Throws
/// std::invalid_argument where not even these fit.
template <element T>
[[nodiscard]] constexpr std::size_t chunk_elements(payload_type type, std::size_t data_bytes) {
  const std::size_t unit = chunk_unit(type);
  const std::size_t units = data_bytes / payload_bytes<T>(type, unit);
  if (units == 0)
    lamina::detail::refuse(data_bytes, " bytes of data a packet: not even ", unit, " elements fit");
  return units * unit;
}

/// Where chunks lie: how the fragments of a model are cut when they are sent in one payload type. Both ends of a transfer build the same.
class chunk_grid {
 public:
  /// Bytes of one chunk within the payload of its fragment: one range, and of int8, int4 and ternary two, scales and integers.
  struct piece {
    std::size_t begin = 0;
    std::size_t bytes = 0;
  };

  /// \param fragments           the layout of the frames: worker::fragments() where layers are cut
  /// \param type            how the elements are written
  /// \param chunk_elements  see chunk_elements()
  /// \throws std::invalid_argument  a chunk that is no multiple of 8 elements, or of 64 in int8, int4 and ternary, or larger than a
  ///                                datagram; a fragment of more than 2^32 - 1 chunks; more than 2^32 - 1 fragments
  template <element T>
  [[nodiscard]] static chunk_grid of(const layout& fragments, payload_type type, std::size_t chunk_elements) {
    return chunk_grid(fragments, sizeof(T), type, chunk_elements);
  }

  /// Whether both cut alike: the same layout, types and chunk size.
  friend bool operator==(const chunk_grid& a, const chunk_grid& b) noexcept {
    return a.fragments_.fingerprint() == b.fragments_.fingerprint() && a.type_ == b.type_ &&
           a.element_bytes_ == b.element_bytes_ && a.chunk_elements_ == b.chunk_elements_;
  }

  [[nodiscard]] const layout& fragments() const noexcept { return fragments_; }
  [[nodiscard]] payload_type type() const noexcept { return type_; }
  [[nodiscard]] std::size_t element_bytes() const noexcept { return element_bytes_; }
  [[nodiscard]] std::size_t chunk_elements() const noexcept { return chunk_elements_; }

  // None of these looks at its index: it comes from the grid, or was checked by has().
  [[nodiscard]] bool has(std::uint32_t fragment, std::uint32_t index) const noexcept {
    return fragment < fragments_.layers() && index < chunks(fragment);
  }
  /// c_l, the chunks of a fragment; 0 of an empty one.
  [[nodiscard]] std::uint32_t chunks(std::size_t fragment) const noexcept {
    const std::size_t elements = fragments_.sizes()[fragment];
    return static_cast<std::uint32_t>(elements / chunk_elements_ + (elements % chunk_elements_ != 0));
  }
  /// Of all fragments.
  [[nodiscard]] std::size_t chunks() const noexcept { return chunks_; }
  [[nodiscard]] std::size_t elements(std::size_t fragment, std::uint32_t index) const noexcept {
    return (std::min)(chunk_elements_, fragments_.sizes()[fragment] - begin(index));
  }
  /// The first element of a chunk.
  [[nodiscard]] std::size_t begin(std::uint32_t index) const noexcept { return index * chunk_elements_; }
  /// Bytes of a whole fragment, and of one chunk, on the wire.
  [[nodiscard]] std::size_t fragment_bytes(std::size_t fragment) const noexcept {
    return bytes_of(fragments_.sizes()[fragment]);
  }
  [[nodiscard]] std::size_t data_bytes(std::size_t fragment, std::uint32_t index) const noexcept {
    return bytes_of(elements(fragment, index));
  }
  [[nodiscard]] std::array<piece, 2> pieces(std::size_t fragment, std::uint32_t index) const noexcept {
    const std::size_t count = elements(fragment, index);
    if (!has_blocks(type_)) return {{{bytes_of(begin(index)), bytes_of(count)}, {}}};
    const std::size_t scales = payload_blocks(count);
    const std::size_t before = payload_blocks(begin(index));
    return {{{before, scales},
             {payload_blocks(fragments_.sizes()[fragment]) + bytes_of(begin(index)) - before,
              bytes_of(count) - scales}}};
  }
  /// Of a bitmap of the chunks of a fragment: chunk i is bit i mod 8 of byte i / 8, counted from the least significant.
  [[nodiscard]] std::size_t bitmap_bytes(std::size_t fragment) const noexcept {
    return (std::size_t{chunks(fragment)} + 7) / 8;
  }

 private:
  chunk_grid(const layout& fragments, std::size_t element_bytes, payload_type type,
             std::size_t chunk_elements)
      : fragments_(fragments), type_(type), element_bytes_(element_bytes), chunk_elements_(chunk_elements) {
    using lamina::detail::refuse;
    const std::string chunks_of = "chunks of " + std::to_string(chunk_elements) + " elements: ";
    const std::size_t unit = chunk_unit(type);
    if (chunk_elements == 0 || chunk_elements % unit != 0) refuse(chunks_of, "must be a multiple of ", unit);
    constexpr std::size_t most_datagram_bytes = 65'507 - 56;  // of UDP over IPv4, without a packet's header
    if (chunk_elements > most_datagram_bytes || bytes_of(chunk_elements) > most_datagram_bytes)
      refuse(chunks_of, "larger than a datagram");
    constexpr std::size_t most = (std::numeric_limits<std::uint32_t>::max)();
    if (fragments.layers() > most) refuse("more than 2^32 - 1 fragments");
    // Those of all fragments have room for a frame's header.
    std::size_t bytes_left = (std::numeric_limits<std::size_t>::max)() / 2;
    for (std::size_t l = 0; l < fragments.layers(); ++l) {
      if (fragments.sizes()[l] / chunk_elements >= most)
        refuse("layer '", fragments[l].name, "' has more than 2^32 - 1 chunks");
      // No chunk is larger than a datagram, so that the bytes of a fragment can be counted.
      if (fragment_bytes(l) > bytes_left) refuse("the bytes of the layout cannot be counted");
      bytes_left -= fragment_bytes(l);
      chunks_ += chunks(l);
    }
  }

  [[nodiscard]] std::size_t bytes_of(std::size_t elements) const noexcept {
    return element_bytes_ == sizeof(float) ? payload_bytes<float>(type_, elements)
                                           : payload_bytes<double>(type_, elements);
  }

  layout fragments_;
  payload_type type_;
  std::size_t element_bytes_;
  std::size_t chunk_elements_;
  std::size_t chunks_ = 0;
};

namespace detail {

[[nodiscard]] inline bool has_bit(std::span<const std::byte> bits, std::size_t index) noexcept {
  return ((bits[index / 8] >> (index % 8)) & std::byte{1}) != std::byte{0};
}

[[nodiscard]] inline bool has_all(std::span<const std::byte> bits,
                                  std::span<const std::byte> wanted) noexcept {
  return std::ranges::equal(bits, wanted,
                            [](std::byte has, std::byte wants) { return (wants & ~has) == std::byte{0}; });
}

/// Chunks of a grid: of each fragment its bitmap, as it goes over the wire.
class chunk_set {
 public:
  explicit chunk_set(const chunk_grid& grid) {
    for (std::size_t fragment = 0; fragment < grid.fragments().layers(); ++fragment)
      bits_.emplace_back(grid.bitmap_bytes(fragment));
  }
  void fill(std::byte bits) noexcept {
    for (auto& each : bits_) std::ranges::fill(each, bits);
  }
  [[nodiscard]] bool has(std::size_t fragment, std::size_t index) const noexcept {
    return has_bit(bits_[fragment], index);
  }
  void add(std::size_t fragment, std::size_t index) noexcept {
    bits_[fragment][index / 8] |= std::byte{1} << (index % 8);
  }
  [[nodiscard]] std::span<std::byte> bits(std::size_t fragment) noexcept { return bits_[fragment]; }
  [[nodiscard]] std::span<const std::byte> bits(std::size_t fragment) const noexcept {
    return bits_[fragment];
  }

 private:
  std::vector<std::vector<std::byte>> bits_;
};

}  // namespace detail

/// What a tag has with the position: the chunk may be dropped before those that are protected.
inline constexpr std::uint8_t droppable_tag = 4;

/// One chunk of a fragment. Chunks are ordered as they lie in the layout.
struct chunk {
  std::uint32_t fragment = 0;
  std::uint32_t index = 0;
  /// Bits 0 and 1: the quarter of the layout, by elements, in which the fragment begins, 0 in front; bit 2: droppable_tag.
  std::uint8_t tag = 0;

  friend auto operator<=>(const chunk&, const chunk&) = default;
};

/// Elements of a layer that is not in the frame, which the receiver has lost: whole chunks, as they go out.
struct repair {
  std::size_t layer = 0;
  std::size_t begin = 0;  ///< in elements
  std::span<const std::byte> elements;
};

/// What decides in which order the chunks of a frame go out, and what becomes of them in a switch.
struct sending_options {
  /// The bound p, in parts per million, at most half: of c_l chunks of a fragment, floor(p·c_l) may be missing.
  std::uint32_t bound_ppm = 0;
  /// Whether chunks have tags: in the first quarter of the layout four tenths of a fragment are droppable, in those after it three, two and
  /// one, those of the smallest magnitude. Without tags no magnitudes are taken, and the chunks of a fragment are sent as they lie.
  bool tags = true;
};

/// The chunks of a frame, in the order in which they are to be sent. Points into the frame, which must stay as it is.
///
/// First come the chunks of fragments of which nothing may be missing, as they lie: memory is read in a row. All others follow by their
/// quantile within their fragment: the rank by magnitude, mean |x| over the elements as they are sent, descending, over c_l; ties by
/// fragment and index. It is a total order, so runs repeat. By quantile every fragment has 1 - p of its chunks sent when 1 - p of the frame
/// is; by the magnitudes themselves one of small numbers would be sent last, whole. Required chunks come before all: the sender knows them.
///
/// Source: tags by layer and magnitude: Wang et al., Domain-specific Communication Optimization for Distributed DNN Training
/// (arXiv 2008.08445). Cost: c log c for c chunks and one read of what is sent, without tags none.
class frame_chunks {
 public:
  /// \param frame    without a checksum, which would not hold for a frame of which fragments are missing
  /// \param sent     the layers in it
  /// \param grid     how it is cut: of its layout, element and payload type
  /// \param options  bound and tags
  /// \throws std::invalid_argument  the frame is not of this selection and grid, has a checksum or is not there; an option outside its
  ///                                range
  frame_chunks(const encoded_frame& frame, const selection& sent, const chunk_grid& grid,
               const sending_options& options = {})
      : sent_(sent), grid_(grid), options_(options), fragments_(grid.fragments().layers()) {
    using lamina::detail::refuse;
    if (bound_ppm() > most_bound_ppm)
      refuse("a loss bound of ", bound_ppm(), " parts per million: at most half may be missing");
    const auto segments = frame.segments();
    if (segments.empty()) refuse("there is no frame");
    prefix_ = segments.front();
    const auto header = lamina::detail::read_header(prefix_);
    if ((header.flags & lamina::detail::flag_checksum) != 0)
      refuse("the frame has a checksum, which would not hold where chunks are missing: encode without one");
    const auto bitmap =
        prefix_.subspan(lamina::detail::wire_header_bytes, (grid_.fragments().layers() + 7) / 8);
    if (header.fingerprint != grid_.fragments().fingerprint() ||
        sent_.model().fingerprint() != header.fingerprint ||
        !std::ranges::equal(bitmap, std::as_bytes(sent_.bitmap())) ||
        header.payload_type != static_cast<std::uint8_t>(grid_.type()) ||
        (header.element_type == lamina::detail::element_code<double> ? 8U : 4U) != grid_.element_bytes()) {
      refuse("the frame is of another layout, selection or type than its chunks");
    }
    std::size_t segment = 1;
    for (const std::size_t fragment : sent_.sent()) fragments_[fragment] = segments[segment++];

    auto order = quantiles();
    std::ranges::sort(order);
    order_.reserve(order.size());
    for (const auto& [quantile, which] : order) order_.push_back(which);
  }

  [[nodiscard]] std::span<const chunk> in_sending_order() const& noexcept { return order_; }
  void in_sending_order() const&& = delete;  // it would be gone
  /// The bytes of one chunk of the frame where they lie: one span; of int8, int4 and ternary two, scales and integers.
  [[nodiscard]] std::array<std::span<const std::byte>, 2> bytes_of(const chunk& which) const noexcept {
    const auto pieces = grid_.pieces(which.fragment, which.index);
    const std::span<const std::byte> fragment = fragments_[which.fragment];
    return {fragment.subspan(pieces[0].begin, pieces[0].bytes),
            fragment.subspan(pieces[1].begin, pieces[1].bytes)};
  }
  /// The tag of a chunk that is not to be dropped, of any fragment that is not empty.
  [[nodiscard]] std::uint8_t protected_tag(std::size_t fragment) const noexcept {
    if (!options_.tags) return 0;
    // What has chunks lies in memory, so that four times as many elements can be counted.
    return static_cast<std::uint8_t>(4 * grid_.fragments().offset(fragment) / grid_.fragments().elements());
  }
  [[nodiscard]] const selection& sent() const noexcept { return sent_; }
  [[nodiscard]] const chunk_grid& grid() const noexcept { return grid_; }
  [[nodiscard]] std::uint32_t bound_ppm() const noexcept { return options_.bound_ppm; }
  /// Header and bitmap of the frame.
  [[nodiscard]] std::span<const std::byte> prefix() const noexcept { return prefix_; }

 private:
  // Of each chunk; negative in a fragment of which nothing may be missing.
  std::vector<std::pair<double, chunk>> quantiles() const {
    std::vector<std::pair<double, chunk>> order;
    std::vector<double> magnitudes;
    std::vector<std::uint32_t> ranked;
    for (const std::size_t fragment : sent_.sent()) {
      const std::uint32_t count = grid_.chunks(fragment);
      ranked.resize(count);
      for (std::uint32_t i = 0; i < count; ++i) ranked[i] = i;
      std::uint8_t position = 0;
      std::uint32_t droppable = 0;
      if (options_.tags) {
        grid_.element_bytes() == sizeof(float) ? measure<float>(fragment, magnitudes)
                                               : measure<double>(fragment, magnitudes);
        std::ranges::stable_sort(
            ranked, [&](std::uint32_t a, std::uint32_t b) { return magnitudes[a] > magnitudes[b]; });
        position = protected_tag(fragment);
        droppable = static_cast<std::uint32_t>(std::uint64_t{4U - position} * count / 10);
      }
      const bool can_be_spared = allowed_losses(bound_ppm(), count) > 0;
      for (std::uint32_t rank = 0; rank < count; ++rank) {
        const bool is_droppable = rank >= count - droppable;
        const auto tag = static_cast<std::uint8_t>(position | (is_droppable ? droppable_tag : 0));
        order.push_back({can_be_spared ? static_cast<double>(rank) / count : -1.0,
                         {static_cast<std::uint32_t>(fragment), ranked[rank], tag}});
      }
    }
    return order;
  }

  // mean |x| of each chunk of a fragment, as it is sent; NaN counts as infinity.
  template <element T>
  void measure(std::size_t fragment, std::vector<double>& magnitudes) const {
    std::array<T, lamina::detail::block_elements> buffer;
    const std::size_t elements = grid_.fragments().sizes()[fragment];
    magnitudes.resize(grid_.chunks(fragment));
    for (std::uint32_t i = 0; i < magnitudes.size(); ++i) {
      const std::size_t begin = grid_.begin(i);
      const std::size_t end = begin + grid_.elements(fragment, i);
      double total = 0;
      for (std::size_t at = begin; at < end; at += buffer.size()) {
        const auto block = std::span(buffer).first((std::min)(buffer.size(), end - at));
        lamina::detail::decode_payload<T>(grid_.type(), fragments_[fragment].data(), elements, at, block);
        total += l1_norm{}(block);
      }
      magnitudes[i] = lamina::detail::ordered_value(total / static_cast<double>(end - begin));
    }
  }

  selection sent_;
  chunk_grid grid_;
  sending_options options_;
  std::span<const std::byte> prefix_;
  std::vector<std::span<const std::byte>> fragments_;  // the payload of each; empty: dropped
  std::vector<chunk> order_;
};

/// How often in a row each chunk of the model was lost, of one sender and receiver: one byte a chunk. It belongs to the loop that commits,
/// is not saved with the residual, and begins at 0 after a resume.
class loss_memory {
 public:
  explicit loss_memory(const chunk_grid& grid) : grid_(grid) {
    for (std::size_t fragment = 0; fragment < grid.fragments().layers(); ++fragment)
      losses_.emplace_back(grid.chunks(fragment));
  }

  /// A transfer has ended. Chunks of fragments that it did not send stay as they are. Throws std::invalid_argument, and changes nothing,
  /// for a delivery of another layout or chunk size.
  void note(const delivery& arrived) {
    require_grid(arrived.sent(), arrived.chunk_elements());
    for (const std::size_t fragment : arrived.sent().sent()) {
      for (std::size_t i = 0; i < losses_[fragment].size(); ++i) {
        std::uint8_t& losses = losses_[fragment][i];
        losses = arrived.is_lost(fragment, i) ? static_cast<std::uint8_t>((std::min)(losses + 1, 255)) : 0;
      }
    }
  }

  /// The chunks, as they lie in the layout, that were lost in the last `max_losses` transfers of their fragment: the next must bring them.
  /// None for max_losses 0; more than 255 counts as 255. Throws std::invalid_argument for a selection of another layout.
  [[nodiscard]] std::vector<chunk> required(const selection& sent, unsigned max_losses) const {
    require_grid(sent, grid_.chunk_elements());
    std::vector<chunk> found;
    for (const std::size_t fragment : sent.sent()) {
      for (std::uint32_t i = 0; max_losses > 0 && i < losses_[fragment].size(); ++i) {
        if (losses_[fragment][i] >= (std::min)(max_losses, 255U))
          found.push_back({static_cast<std::uint32_t>(fragment), i, 0});
      }
    }
    return found;
  }

 private:
  void require_grid(const selection& sent, std::size_t chunk_elements) const {
    if (sent.model().fingerprint() != grid_.fragments().fingerprint() ||
        chunk_elements != grid_.chunk_elements())
      lamina::detail::refuse("chunks of another layout or size");
  }

  chunk_grid grid_;
  std::vector<std::vector<std::uint8_t>> losses_;  // of each fragment
};

}  // namespace lamina::inline LAMINA_ABI::bounded
