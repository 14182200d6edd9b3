// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/detail/checksum.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/error.hpp"
#include "lamina/layout.hpp"
#include "lamina/selection.hpp"
#include "lamina/tensor.hpp"

/// The list-[0] codec: selected layers to bytes and back. docs/wire-format.md describes every byte.
namespace lamina {

namespace detail {
struct frame_decoder;
}

enum class frame_kind : std::uint8_t { gradients = 1, parameters = 2 };

/// Whether frames are written with a checksum: needs xxHash's header where lamina is compiled.
inline constexpr bool checksums_available = detail::checksum::available;

/// A frame ready to send: header and bitmap, then the layers where they already lie. Nothing is copied; the
/// segments point into the sender's memory and stay valid until that memory changes or the encoder begins its
/// next frame.
class encoded_frame {
 public:
  /// The pieces in order, for writev, MPI datatypes or NCCL; the first is the header with the bitmap.
  std::span<const std::span<const std::byte>> segments() const noexcept { return segments_; }
  std::size_t size_bytes() const noexcept { return size_bytes_; }

  /// Writes the frame in one piece. Throws std::invalid_argument unless `to` has size_bytes() bytes.
  void copy_to(std::span<std::byte> to) const {
    if (to.size() != size_bytes_) {
      throw std::invalid_argument("the frame has " + std::to_string(size_bytes_) + " bytes, the buffer " +
                                  std::to_string(to.size()));
    }
    for (const auto segment : segments_) {
      std::memcpy(to.data(), segment.data(), segment.size());
      to = to.subspan(segment.size());
    }
  }
  /// The frame in one piece of its own.
  std::vector<std::byte> to_bytes() const {
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

/// Builds frames of one layout. Allocates only in its first frame.
template <element T>
class frame_encoder {
 public:
  explicit frame_encoder(const layout& model)
      : model_(model), prefix_(detail::wire_header_bytes + detail::padded_bitmap_bytes(model.layers())) {
    frame_.segments_.reserve(model.layers() + 1);
  }

  /// A frame with the layers that `chosen` sends. `layer_elements(l)` gives layer l as a std::span<const T>
  /// of n_l elements; it is called for the layers sent, in order.
  ///
  /// \param sender  the worker's index in [0, W) in a gradient frame, 0 in the server's
  /// \return the frame, valid until the next call
  /// \throws std::invalid_argument  the selection is of another layout, or a span has another size than its layer
  ///
  /// Cost: O(L) and, for the checksum, one read of what is sent. No copy.
  template <class LayerElements>
  const encoded_frame& encode(frame_kind kind, std::uint64_t step, std::uint32_t sender,
                              const selection& chosen, LayerElements&& layer_elements) {
    if (chosen.model().fingerprint() != model_.fingerprint()) {
      throw std::invalid_argument("the selection is of another layout than the frame");
    }
    frame_.segments_.assign(1, prefix_);
    std::size_t payload_bytes = 0;
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (chosen.is_dropped(l)) continue;
      const std::span<const T> elements = layer_elements(l);
      model_.check_size(l, elements.size());
      frame_.segments_.push_back(std::as_bytes(elements));
      payload_bytes += frame_.segments_.back().size();
    }
    frame_.size_bytes_ = prefix_.size() + payload_bytes;

    detail::wire_header header;
    header.element_type = detail::element_code<T>;
    header.kind = static_cast<std::uint8_t>(kind);
    header.flags = checksums_available ? detail::flag_checksum : 0;
    header.sender = sender;
    header.step = step;
    header.fingerprint = model_.fingerprint();
    header.layers = model_.layers();
    header.payload_bytes = payload_bytes;
    detail::write_header(prefix_, header);
    const auto bitmap = std::as_bytes(chosen.bitmap());
    std::ranges::copy(bitmap, prefix_.begin() + detail::wire_header_bytes);

    header.checksum = frame_checksum();
    detail::write_header(prefix_, header);
    return frame_;
  }

 private:
  std::uint64_t frame_checksum() const noexcept {
    detail::checksum sum;
    sum.add(std::span(prefix_).first(detail::checksum_offset));
    sum.add(std::span(prefix_).subspan(detail::wire_header_bytes));
    for (const auto segment : frame_.segments().subspan(1)) sum.add(segment);
    return sum.value();
  }

  layout model_;
  std::vector<std::byte> prefix_;
  encoded_frame frame_;
};

/// A decoded frame: a view into the bytes given to decode, which must outlive it.
/// Default-constructed, and after a failed decode, it has no layers.
template <element T>
class frame_view {
 public:
  frame_view() = default;

  frame_kind kind() const noexcept { return kind_; }
  /// The step the sender was in, counted from 1.
  std::uint64_t step() const noexcept { return step_; }
  std::uint32_t sender() const noexcept { return sender_; }
  /// L, the number of layers, sent or not.
  std::size_t layers() const noexcept { return begins_.empty() ? 0 : begins_.size() - 1; }
  /// Elements of the layers that were sent, together.
  std::size_t sent_elements() const noexcept { return payload_.size(); }

  /// True for list [0]. Throws std::out_of_range.
  bool is_dropped(std::size_t layer) const {
    check_layer(layer);
    return begins_[layer] == begins_[layer + 1];
  }
  /// The n_l elements of a layer that was sent; an empty span for list [0]. Throws std::out_of_range.
  std::span<const T> layer(std::size_t layer) const {
    check_layer(layer);
    return payload_.subspan(begins_[layer], begins_[layer + 1] - begins_[layer]);
  }
  /// Copies a layer into `out`, a tensor of n_l elements to write; list [0] becomes zeros. Throws
  /// std::out_of_range, or std::invalid_argument if `out` has another size, before anything is written.
  template <class Tensor>
  void restore(std::size_t layer, Tensor&& out) const {
    check_layer(layer);
    const std::span<T> to = writable_elements_of<T>(out);
    model_->check_size(layer, to.size());
    if (is_dropped(layer)) {
      std::ranges::fill(to, T(0));
    } else {
      std::ranges::copy(this->layer(layer), to.begin());
    }
  }
  /// Whether this is a frame of the layout; false for a view that was not decoded.
  bool is_of(const layout& model) const noexcept {
    return model_ && model_->fingerprint() == model.fingerprint();
  }

 private:
  friend struct detail::frame_decoder;

  void check_layer(std::size_t layer) const {
    if (layer >= layers()) {
      throw std::out_of_range("layer index " + std::to_string(layer) + " is out of range: the frame has " +
                              std::to_string(layers()) + " layers");
    }
  }

  frame_kind kind_{};
  std::uint64_t step_ = 0;
  std::uint32_t sender_ = 0;
  std::optional<layout> model_;
  std::span<const T> payload_;
  std::vector<std::size_t> begins_;  // L + 1 positions in the payload; equal neighbours are list [0]
};

namespace detail {

// Each check uses only what the checks before it have established; nothing is allocated by what the bytes
// claim.
struct frame_decoder {
  template <element T>
  static std::error_code decode(std::span<const std::byte> bytes, const layout& model, frame_view<T>& out) {
    if (bytes.size() < wire_header_bytes) return frame_errc::truncated;
    const wire_header header = read_header(bytes);
    if (const std::error_code bad = check_header<T>(header, model)) return bad;

    const std::size_t bitmap_bytes = padded_bitmap_bytes(model.layers());
    if (bytes.size() - wire_header_bytes < bitmap_bytes) return frame_errc::truncated;
    const auto bitmap = bytes.subspan(wire_header_bytes, bitmap_bytes);
    if (!is_canonical(bitmap, model)) return frame_errc::bad_presence;

    std::vector<std::size_t> begins(model.layers() + 1);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      begins[l + 1] = begins[l] + (is_present(bitmap, l) ? model.sizes()[l] : 0);
    }
    const std::size_t available_bytes = bytes.size() - wire_header_bytes - bitmap_bytes;
    const std::size_t sent = begins.back();
    if (header.payload_bytes % sizeof(T) != 0 || header.payload_bytes / sizeof(T) != sent) {
      return frame_errc::bad_payload_size;
    }
    if (available_bytes < header.payload_bytes) return frame_errc::truncated;
    if (available_bytes > header.payload_bytes) return frame_errc::trailing_bytes;
    if (const std::error_code bad = check_checksum(header, bytes)) return bad;
    const std::byte* payload = bytes.data() + wire_header_bytes + bitmap_bytes;
    if (reinterpret_cast<std::uintptr_t>(payload) % alignof(T) != 0) return frame_errc::misaligned_buffer;

    out.kind_ = static_cast<frame_kind>(header.kind);
    out.step_ = header.step;
    out.sender_ = header.sender;
    out.model_ = model;
    out.payload_ = {reinterpret_cast<const T*>(payload), sent};
    out.begins_ = std::move(begins);
    return {};
  }

 private:
  template <element T>
  static std::error_code check_header(const wire_header& header, const layout& model) noexcept {
    if (header.magic != wire_magic) return frame_errc::bad_magic;
    if (header.version != wire_version) return frame_errc::unsupported_version;
    if (header.element_type != element_code<T>) return frame_errc::wrong_element_type;
    if (header.kind != static_cast<std::uint8_t>(frame_kind::gradients) &&
        header.kind != static_cast<std::uint8_t>(frame_kind::parameters)) {
      return frame_errc::unknown_kind;
    }
    if ((header.flags & ~flag_checksum) != 0 || header.reserved != 0) return frame_errc::nonzero_reserved;
    if (header.fingerprint != model.fingerprint() || header.layers != model.layers())
      return frame_errc::wrong_layout;
    return {};
  }

  static bool is_present(std::span<const std::byte> bitmap, std::size_t layer) noexcept {
    return ((bitmap[layer / 8] >> (layer % 8)) & std::byte{1}) != std::byte{0};
  }

  static bool is_canonical(std::span<const std::byte> bitmap, const layout& model) noexcept {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (model.sizes()[l] == 0 && is_present(bitmap, l)) return false;
    }
    for (std::size_t l = model.layers(); l < bitmap.size() * 8; ++l) {
      if (is_present(bitmap, l)) return false;
    }
    return true;
  }

  static std::error_code check_checksum(const wire_header& header,
                                        std::span<const std::byte> bytes) noexcept {
    if ((header.flags & flag_checksum) == 0) {
      return header.checksum == 0 ? std::error_code{} : frame_errc::checksum_mismatch;
    }
    if (!checksum::available) return frame_errc::checksum_unsupported;
    checksum sum;
    sum.add(bytes.first(checksum_offset));
    sum.add(bytes.subspan(wire_header_bytes));
    return sum.value() == header.checksum ? std::error_code{} : frame_errc::checksum_mismatch;
  }
};

}  // namespace detail

/// Bytes to a frame of the model's layout. `error` is set to a frame_errc, or to std::errc::not_enough_memory
/// if the index of L + 1 positions cannot be allocated, and the view returned then has no layers.
///
/// For any bytes whatever: reads only within them, allocates only by the layout, changes nothing. The payload
/// must be aligned for T, as it is when the bytes begin at a multiple of 64 or of alignof(T). Cost: O(L), and
/// for the checksum one read of the bytes.
template <element T>
frame_view<T> decode(std::span<const std::byte> bytes, const layout& model, std::error_code& error) noexcept {
  frame_view<T> view;
  try {
    error = detail::frame_decoder::decode(bytes, model, view);
  } catch (const std::bad_alloc&) {
    error = std::make_error_code(std::errc::not_enough_memory);
  }
  return view;
}

/// The same; throws decode_error.
template <element T>
frame_view<T> decode(std::span<const std::byte> bytes, const layout& model) {
  std::error_code error;
  frame_view<T> view = decode<T>(bytes, model, error);
  if (error) throw decode_error(error);
  return view;
}

/// A frame that is gone when decode returns cannot be viewed: keep the bytes.
template <element T>
frame_view<T> decode(std::vector<std::byte>&&, const layout&) = delete;
template <element T>
frame_view<T> decode(std::vector<std::byte>&&, const layout&, std::error_code&) = delete;

/// Throws decode_error with unexpected_kind or unexpected_step unless the frame is of this kind and step:
/// late, early and replayed frames are refused by it.
template <element T>
void expect(const frame_view<T>& frame, frame_kind kind, std::uint64_t step) {
  const auto refuse = [&](frame_errc code) {
    throw decode_error(make_error_code(code), "frame of sender " + std::to_string(frame.sender()) +
                                                  ", step " + std::to_string(frame.step()) +
                                                  ", where one of step " + std::to_string(step) +
                                                  " is expected");
  };
  if (frame.kind() != kind) refuse(frame_errc::unexpected_kind);
  if (frame.step() != step) refuse(frame_errc::unexpected_step);
}

}  // namespace lamina
