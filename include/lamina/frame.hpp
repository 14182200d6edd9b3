// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/payload.hpp"
#include "lamina/selection.hpp"

// Inlined, so that nothing is to be linked. What this header cannot undo: xxHash's own macros stay, and where a file includes
// <xxhash.h> after it, the functions there are the inlined ones as well. They do the same; a file that wants those of
// libxxhash, or other settings of xxHash, leaves lamina to another file.
#if defined(XXH_INLINE_ALL)
#include <xxhash.h>  // of the package libxxhash-dev, xxhash or xxHash
#else
#define XXH_INLINE_ALL
#include <xxhash.h>  // of the package libxxhash-dev, xxhash or xxHash
#undef XXH_INLINE_ALL
#endif

/// What goes over the wire: a frame that is ready to send, and one that has come. A layer is in it, or not, by a bit and never by a value.
/// codec.hpp makes the one and reads the other; docs/wire-format.md has every byte.
namespace lamina::inline LAMINA_ABI {

namespace detail {

static_assert(
    std::endian::native == std::endian::little,
    "lamina: frames are little-endian and sent out of memory as they are; this machine is big-endian");

inline constexpr std::size_t wire_header_bytes = 64;
inline constexpr std::size_t checksum_offset = 56;
inline constexpr std::size_t payload_alignment_bytes = 64;
inline constexpr std::size_t most_user_bytes = 64;
inline constexpr std::uint32_t wire_magic = 0x4d414cf4;  // the bytes F4 'L' 'A' 'M'
inline constexpr std::uint16_t wire_version = 2;
inline constexpr std::uint32_t flag_checksum = 1;
inline constexpr std::uint32_t flag_last = 2;  // of its sender's step
inline constexpr std::uint32_t known_flags = flag_checksum | flag_last;

template <element T>
inline constexpr std::uint8_t element_code = sizeof(T) == 4 ? 1 : 2;

struct wire_header {
  std::uint32_t magic = wire_magic;
  std::uint16_t version = wire_version;
  std::uint8_t element_type = 0;
  std::uint8_t kind = 0;
  std::uint32_t flags = 0;
  std::uint32_t sender = 0;
  std::uint64_t step = 0;
  std::uint64_t fingerprint = 0;
  std::uint32_t layers = 0;
  std::uint16_t sequence = 0;  // within its step and sender
  std::uint8_t payload_type = 0;
  std::uint8_t user_bytes = 0;
  std::uint64_t payload_bytes = 0;
  std::uint32_t run = 0;  // 0: none
  std::uint32_t reserved = 0;
  std::uint64_t checksum = 0;
};
static_assert(sizeof(wire_header) == wire_header_bytes && offsetof(wire_header, layers) == 32 &&
              offsetof(wire_header, payload_bytes) == 40 &&
              offsetof(wire_header, checksum) == checksum_offset);

/// A bit a layer.
template <std::unsigned_integral Number>
[[nodiscard]] constexpr Number bitmap_bytes(Number layers) noexcept {
  return layers / 8 + (layers % 8 != 0);
}
/// Presence bitmap, the user's bytes, and the zeros that bring the payload to its alignment.
template <std::unsigned_integral Number>
[[nodiscard]] constexpr Number padded_bitmap_bytes(Number layers, Number user_bytes = 0) noexcept {
  const Number bytes = bitmap_bytes(layers) + user_bytes;
  const Number rest = bytes % payload_alignment_bytes;
  return rest == 0 ? bytes : bytes + (payload_alignment_bytes - rest);
}

[[nodiscard]] inline wire_header read_header(std::span<const std::byte> bytes) noexcept {
  wire_header header;
  std::memcpy(&header, bytes.data(), sizeof header);
  return header;
}

/// XXH3 (64 bits, seed 0) over bytes that come in several spans.
class checksum {
 public:
  checksum() noexcept { XXH3_64bits_reset(&state_); }
  checksum& add(std::span<const std::byte> bytes) noexcept {
    if (!bytes.empty()) XXH3_64bits_update(&state_, bytes.data(), bytes.size());
    return *this;
  }
  [[nodiscard]] std::uint64_t value() const noexcept { return XXH3_64bits_digest(&state_); }

 private:
  XXH3_state_t state_;
};

struct frame_decoder;

/// Throws std::invalid_argument, naming the call, if a chunk of integers could arrive without its scale.
inline void check_chunks(const char* call, const delivery& arrived, payload_type payload) {
  if (!has_blocks(payload) || arrived.chunk_elements() % payload_block_elements == 0) return;
  refuse(call, ": chunks of an ", name_of(payload), " payload have a multiple of ", payload_block_elements,
         " elements, these have ", arrived.chunk_elements());
}

/// The same, unless `arrived` is of what `sent` selects.
inline void check_delivery(const char* call, const delivery& arrived, const selection& sent,
                           payload_type payload) {
  const selection& of = arrived.sent();
  if (of.model().fingerprint() != sent.model().fingerprint() ||
      !std::ranges::equal(of.bitmap(), sent.bitmap()))
    refuse(call, ": the delivery is of another frame");
  check_chunks(call, arrived, payload);
}

}  // namespace detail

/// A frame ready to send: header and bitmap, then the layers where they already lie. The segments point into the sender's memory, and are
/// valid until that changes or the encoder begins its next frame.
class encoded_frame {
 public:
  /// In order, for writev, MPI datatypes or NCCL; the first is the header with the bitmap.
  [[nodiscard]] std::span<const std::span<const std::byte>> segments() const noexcept { return segments_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }

  /// Writes the frame in one piece. Throws std::invalid_argument unless `to` has size_bytes() bytes.
  void copy_to(std::span<std::byte> to) const {
    if (to.size() != size_bytes_)
      detail::refuse("the frame has ", size_bytes_, " bytes, the buffer ", to.size());
    for (const auto segment : segments_) {
      std::memcpy(to.data(), segment.data(), segment.size());
      to = to.subspan(segment.size());
    }
  }
  /// The frame in one piece of its own.
  [[nodiscard]] std::vector<std::byte> to_bytes() const {
    std::vector<std::byte> bytes(size_bytes_);
    copy_to(bytes);
    return bytes;
  }

 private:
  template <element T>
  friend class frame_encoder;
  std::vector<std::span<const std::byte>> segments_;
  std::size_t size_bytes_ = 0;
};

/// What the first bytes of a frame tell: see peek() in codec.hpp.
struct frame_info {
  std::size_t size_bytes = 0;  ///< of the whole frame
  frame_kind kind{};
  payload_type payload{};
  std::size_t element_bytes = 0;  ///< 4: float, 8: double
  std::uint32_t sender = 0;
  std::uint32_t run = 0;  ///< 0: none
  std::uint64_t step = 0;
  std::uint64_t fingerprint = 0;  ///< of the layout, as layout::fingerprint()
  std::uint64_t layers = 0;       ///< L, of that layout
  std::uint16_t sequence = 0;     ///< its number within step and sender
  bool is_last = true;            ///< whether its sender sends no more in this step

  friend bool operator==(const frame_info&, const frame_info&) = default;
};
/// The bytes that peek() looks at.
inline constexpr std::size_t peek_bytes = detail::wire_header_bytes;

/// The bytes of the largest frame of a layout, worker::fragments(), without user bytes; the largest std::size_t, if that cannot be counted.
template <element T>
[[nodiscard]] std::size_t largest_frame_bytes(const layout& model,
                                              payload_type type = payload_type::as_is) noexcept {
  constexpr std::size_t most = (std::numeric_limits<std::size_t>::max)();
  std::size_t bytes = detail::wire_header_bytes + detail::padded_bitmap_bytes(model.layers());
  for (const std::size_t elements : model.sizes()) {
    if (elements > most / sizeof(T)) return most;
    const std::size_t layer_bytes = payload_bytes<T>(type, elements);
    if (layer_bytes > most - bytes) return most;
    bytes += layer_bytes;
  }
  return bytes;
}

/// A decoded frame: a view into the bytes given to decode, which must outlive it. Default-constructed, moved from, and after a failed
/// decode, it has no layers and is of no layout. What takes a layer throws std::out_of_range from layers() on.
///
/// A layer that is not in the frame is *dropped*. In a frame of gradients it counts as zeros: restore() writes them. In a frame of
/// parameters it means that the receiver keeps what it has: apply_to() does. Of several frames in a step the last is flagged; a layer is in
/// one of them at most.
template <element T>
class frame_view {
 public:
  [[nodiscard]] frame_kind kind() const noexcept { return is_.info.kind; }
  /// The step the sender was in, counted from 1.
  [[nodiscard]] std::uint64_t step() const noexcept { return is_.info.step; }
  [[nodiscard]] std::uint32_t sender() const noexcept { return is_.info.sender; }
  /// 0: none.
  [[nodiscard]] std::uint32_t run() const noexcept { return is_.info.run; }
  /// L, the number of layers, sent or not.
  [[nodiscard]] std::size_t layers() const noexcept { return is_.begins.empty() ? 0 : is_.begins.size() - 1; }
  /// How the elements are written.
  [[nodiscard]] payload_type payload() const noexcept { return is_.info.payload; }
  /// Elements of the layers that were sent, together.
  [[nodiscard]] std::size_t sent_elements() const noexcept { return is_.sent_elements; }
  /// Its number among the frames of its sender and step: 0, 1, 2, ...; and whether it is the last of them.
  [[nodiscard]] std::uint16_t sequence() const noexcept { return is_.info.sequence; }
  [[nodiscard]] bool is_last() const noexcept { return is_.info.is_last; }
  /// What the sender has added: up to 64 bytes.
  [[nodiscard]] std::span<const std::byte> user() const noexcept { return is_.user; }

  /// True for a layer that is not in the frame.
  [[nodiscard]] bool is_dropped(std::size_t layer) const {
    check_layer(layer);
    return is_.begins[layer] == is_.begins[layer + 1];
  }
  /// The n_l elements of a layer that was sent, where they lie; an empty span for one dropped. Throws std::logic_error if the payload is
  /// not as_is: the other calls read every type.
  [[nodiscard]] std::span<const T> layer(std::size_t layer) const {
    const auto bytes = bytes_of(layer);
    if (is_.info.payload != payload_type::as_is)
      detail::refuse<std::logic_error>("layer: the payload is not as_is: use restore() or apply_to()");
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  /// The bytes of a layer on the wire; none for one dropped.
  [[nodiscard]] std::span<const std::byte> bytes_of(std::size_t layer) const {
    check_layer(layer);
    return is_.bytes.subspan(is_.begins[layer], is_.begins[layer + 1] - is_.begins[layer]);
  }
  /// Copies elements [begin, begin + to.size()) of a layer that was sent; of a payload with blocks `begin` is a multiple of
  /// payload_block_elements. Throws std::out_of_range if they are not there, and std::invalid_argument if `to` overlaps the payload.
  void copy(std::size_t layer, std::size_t begin, std::span<T> to) const {
    check_elements(layer, begin, to.size());
    check_apart(to);
    detail::decode_payload<T>(is_.info.payload, bytes_of(layer).data(), is_.model->sizes()[layer], begin, to);
  }
  /// The same elements without a copy where the payload is as_is; otherwise `buffer`, into which they were copied. Throws as copy().
  [[nodiscard]] std::span<const T> read(std::size_t layer, std::size_t begin, std::span<T> buffer) const {
    if (is_.info.payload != payload_type::as_is) {
      copy(layer, begin, buffer);
      return buffer;
    }
    check_elements(layer, begin, buffer.size());
    return this->layer(layer).subspan(begin, buffer.size());
  }
  /// Calls `consume(begin, block)` with consecutive blocks of a layer, of up to 4,096 elements, as read() gives them, valid during the
  /// call. A layer dropped gives no block.
  template <class Consume>
  void for_each_block(std::size_t layer, Consume&& consume) const {
    if (is_dropped(layer)) return;
    std::array<T, detail::block_elements> buffer;
    const std::size_t elements = is_.model->sizes()[layer];
    for (std::size_t begin = 0; begin < elements; begin += buffer.size()) {
      consume(begin,
              read(layer, begin, std::span(buffer).first((std::min)(buffer.size(), elements - begin))));
    }
  }
  /// A layer of a frame of gradients into `out`, a tensor of n_l elements to write; one dropped becomes zeros. Throws, before anything is
  /// written, std::logic_error for a frame of parameters, and std::invalid_argument if `out` has another size or overlaps the payload.
  template <class Tensor>
  void restore(std::size_t layer, Tensor&& out) const {
    check_layer(layer);
    if (is_.info.kind == frame_kind::parameters)
      detail::refuse<std::logic_error>(
          "restore: what a frame of parameters drops is to be kept: use apply_to()");
    if (!apply_to(layer, out)) std::ranges::fill(writable_elements_of<T>(out), T(0));
  }
  /// Overwrites `out`, a tensor of n_l elements, with the layer if it was sent, which it returns; leaves `out` as it is if it was dropped.
  /// How a worker takes the server's parameters. Throws as restore(), sent or not.
  template <class Tensor>
  bool apply_to(std::size_t layer, Tensor&& out) const {
    check_layer(layer);
    const std::span<T> to = checked_output(layer, out);
    if (is_dropped(layer)) return false;
    copy(layer, 0, to);
    return true;
  }
  /// What has arrived of a layer into `out`; what was lost of it, and a layer dropped, leave `out` as it is. In a frame of gradients, holes
  /// that are bytes of 0 count as zeros: restore(layer, out) reads them as such. Throws as apply_to(), and std::invalid_argument if
  /// `arrived` is of another layout, or of a frame that differs in whether it has the layer, and for chunks that split a block of the
  /// payload.
  template <class Tensor>
  void restore(std::size_t layer, Tensor&& out, const delivery& arrived) const {
    check_layer(layer);
    if (!is_of(arrived.sent().model()) || arrived.sent().is_dropped(layer) != is_dropped(layer)) {
      detail::refuse("restore: the delivery is not of a frame that has sent layer '",
                     (*is_.model)[layer].name, "', or has dropped it, as this one");
    }
    detail::check_chunks("restore", arrived, is_.info.payload);
    const std::span<T> to = checked_output(layer, out);
    arrived.for_each_delivered(layer, [&](std::size_t begin, std::size_t end) {
      copy(layer, begin, to.subspan(begin, end - begin));
    });
  }
  /// Whether this is a frame of the layout; false for a view that was not decoded.
  [[nodiscard]] bool is_of(const layout& model) const noexcept {
    return !is_.begins.empty() && is_.model->fingerprint() == model.fingerprint();
  }

 private:
  friend struct detail::frame_decoder;

  struct contents {
    frame_info info;
    std::span<const std::byte> user;
    std::optional<layout> model;
    std::size_t sent_elements = 0;
    std::span<const std::byte> bytes;
    std::vector<std::size_t> begins;  // L + 1 positions in bytes; equal neighbours are dropped
  };

  void check_layer(std::size_t layer) const {
    if (layer < layers()) return;
    detail::refuse<std::out_of_range>("layer index ", layer, " is out of range: the frame has ", layers(),
                                      " layers");
  }

  void check_elements(std::size_t layer, std::size_t begin, std::size_t count) const {
    // A scale is for a block, so that its elements are read from their first on.
    const bool splits_a_block = has_blocks(is_.info.payload) && begin % payload_block_elements != 0;
    if (is_dropped(layer) || splits_a_block || begin > is_.model->sizes()[layer] ||
        count > is_.model->sizes()[layer] - begin) {
      detail::refuse<std::out_of_range>(
          "elements ", begin, " to ", begin + count, " of layer ", layer,
          (splits_a_block ? " do not begin at a block of the payload" : " are not in the frame"));
    }
  }

  template <class Tensor>
  std::span<T> checked_output(std::size_t layer, Tensor& out) const {
    const std::span<T> to = writable_elements_of<T>(out);
    is_.model->check_size(layer, to.size());
    check_apart(to);
    return to;
  }

  // Writing over the payload would change what the frame says while it is read.
  void check_apart(std::span<const T> to) const {
    // As numbers, since < of two pointers into different arrays would be undefined.
    const auto out = reinterpret_cast<std::uintptr_t>(to.data());
    const auto payload = reinterpret_cast<std::uintptr_t>(is_.bytes.data());
    if (!to.empty() && out < payload + is_.bytes.size() && payload < out + to.size_bytes())
      detail::refuse("the tensor to write overlaps the frame's payload");
  }

  contents is_;
};

}  // namespace lamina::inline LAMINA_ABI
