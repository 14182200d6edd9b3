// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/detail/checksum.hpp"
#include "lamina/detail/kernels.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/encoder.hpp"
#include "lamina/error.hpp"
#include "lamina/layout.hpp"
#include "lamina/payload.hpp"
#include "lamina/tensor.hpp"

namespace lamina {

namespace detail {
struct frame_decoder;
}

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
  /// How the elements are written.
  payload_type payload() const noexcept { return type_; }
  /// Elements of the layers that were sent, together.
  std::size_t sent_elements() const noexcept { return sent_elements_; }

  /// True for list [0]. Throws std::out_of_range.
  bool is_dropped(std::size_t layer) const {
    check_layer(layer);
    return begins_[layer] == begins_[layer + 1];
  }
  /// The n_l elements of a layer that was sent, where they lie; an empty span for list [0]. Throws std::out_of_range,
  /// and std::logic_error if the payload is not as_is: copy(), read() and restore() read every type.
  std::span<const T> layer(std::size_t layer) const {
    check_layer(layer);
    if (type_ != payload_type::as_is)
      throw std::logic_error("the frame's elements are not written as they are: use restore()");
    const auto bytes = bytes_of(layer);
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  /// The bytes of a layer on the wire; none for list [0]. Throws std::out_of_range.
  std::span<const std::byte> bytes_of(std::size_t layer) const {
    check_layer(layer);
    return bytes_.subspan(begins_[layer], begins_[layer + 1] - begins_[layer]);
  }
  /// Copies elements [begin, begin + to.size()) of a layer that was sent; `begin` is a multiple of int8_block_elements.
  /// Throws std::out_of_range if they are not there, and std::invalid_argument if `to` overlaps the frame's payload.
  void copy(std::size_t layer, std::size_t begin, std::span<T> to) const {
    check_elements(layer, begin, to.size());
    check_apart(to);
    detail::decode_payload<T>(type_, bytes_of(layer).data(), model_->sizes()[layer], begin, to);
  }
  /// The same elements without a copy where the payload is as_is; of another payload, `buffer`, into which they were
  /// copied. Throws as copy().
  std::span<const T> read(std::size_t layer, std::size_t begin, std::span<T> buffer) const {
    if (type_ != payload_type::as_is) {
      copy(layer, begin, buffer);
      return buffer;
    }
    check_elements(layer, begin, buffer.size());
    return this->layer(layer).subspan(begin, buffer.size());
  }
  /// Calls `consume(begin, block)` with consecutive blocks of a layer, whatever its payload: a std::span<const T> of up
  /// to 4,096 elements from `begin` on, where they lie if the payload is as_is, and valid during the call otherwise.
  /// List [0] gives no block. Throws std::out_of_range. Allocates nothing.
  template <class Consume>
  void for_each_block(std::size_t layer, Consume&& consume) const {
    if (is_dropped(layer)) return;
    std::array<T, detail::block_elements> buffer;
    const std::size_t elements = model_->sizes()[layer];
    for (std::size_t begin = 0; begin < elements; begin += buffer.size()) {
      consume(begin, read(layer, begin, std::span(buffer).first(std::min(buffer.size(), elements - begin))));
    }
  }
  /// Copies a layer into `out`, a tensor of n_l elements to write; list [0] becomes zeros. Throws
  /// std::out_of_range, or std::invalid_argument if `out` has another size or overlaps the frame's payload, before
  /// anything is written.
  template <class Tensor>
  void restore(std::size_t layer, Tensor&& out) const {
    check_layer(layer);
    const std::span<T> to = writable_elements_of<T>(out);
    model_->check_size(layer, to.size());
    check_apart(to);
    if (is_dropped(layer)) {
      std::ranges::fill(to, T(0));
    } else {
      copy(layer, 0, to);
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

  void check_elements(std::size_t layer, std::size_t begin, std::size_t count) const {
    if (is_dropped(layer) || begin % int8_block_elements != 0 || begin > model_->sizes()[layer] ||
        count > model_->sizes()[layer] - begin) {
      throw std::out_of_range("elements " + std::to_string(begin) + " to " + std::to_string(begin + count) +
                              " of layer " + std::to_string(layer) + " are not in the frame");
    }
  }

  // Writing over the payload would change what the frame says while it is read.
  void check_apart(std::span<const T> to) const {
    const auto out = std::as_bytes(to);
    const std::less<> before;  // of any two addresses, where < would be undefined
    if (!out.empty() && before(out.data(), bytes_.data() + bytes_.size()) &&
        before(bytes_.data(), out.data() + out.size())) {
      throw std::invalid_argument("the tensor to write overlaps the frame's payload");
    }
  }

  frame_kind kind_{};
  std::uint64_t step_ = 0;
  std::uint32_t sender_ = 0;
  std::optional<layout> model_;
  payload_type type_{};
  std::size_t sent_elements_ = 0;
  std::span<const std::byte> bytes_;
  std::vector<std::size_t> begins_;  // L + 1 positions in bytes_; equal neighbours are list [0]
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

    const auto type = static_cast<payload_type>(header.payload_type);
    std::vector<std::size_t> begins(model.layers() + 1);
    std::size_t sent_elements = 0;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::size_t elements = is_present(bitmap, l) ? model.sizes()[l] : 0;
      if (elements > largest_size / sizeof(T)) return frame_errc::bad_payload_size;
      const std::size_t layer_bytes = payload_bytes<T>(type, elements);
      if (layer_bytes > largest_size - begins[l]) return frame_errc::bad_payload_size;
      begins[l + 1] = begins[l] + layer_bytes;
      sent_elements += elements;
    }
    if (header.payload_bytes != begins.back()) return frame_errc::bad_payload_size;
    const auto payload = bytes.subspan(wire_header_bytes + bitmap_bytes);
    if (payload.size() < header.payload_bytes) return frame_errc::truncated;
    if (payload.size() > header.payload_bytes) return frame_errc::trailing_bytes;
    if (const std::error_code bad = check_checksum(header, bytes)) return bad;
    if (type == payload_type::as_is && reinterpret_cast<std::uintptr_t>(payload.data()) % alignof(T) != 0) {
      return frame_errc::misaligned_buffer;
    }

    out.kind_ = static_cast<frame_kind>(header.kind);
    out.step_ = header.step;
    out.sender_ = header.sender;
    out.model_ = model;
    out.type_ = type;
    out.sent_elements_ = sent_elements;
    out.bytes_ = payload;
    out.begins_ = std::move(begins);
    return {};
  }

 private:
  // What a model's layers take may not fit in std::size_t, even if their number of elements does. No frame is that long.
  static constexpr std::size_t largest_size = std::numeric_limits<std::size_t>::max();

  template <element T>
  static std::error_code check_header(const wire_header& header, const layout& model) noexcept {
    if (header.magic != wire_magic) return frame_errc::bad_magic;
    if (header.version != wire_version) return frame_errc::unsupported_version;
    if (header.element_type != element_code<T>) return frame_errc::wrong_element_type;
    if (header.kind != static_cast<std::uint8_t>(frame_kind::gradients) &&
        header.kind != static_cast<std::uint8_t>(frame_kind::parameters)) {
      return frame_errc::unknown_kind;
    }
    if (header.payload_type > static_cast<std::uint8_t>(payload_type::int8))
      return frame_errc::unknown_payload_type;
    if ((header.flags & ~flag_checksum) != 0 || header.reserved != decltype(header.reserved){}) {
      return frame_errc::nonzero_reserved;
    }
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
