// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/checksum.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/error.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/payload.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI {

namespace detail {

// Each check uses only what the checks before it have established; nothing is allocated by what the bytes
// claim.
struct frame_decoder {
  template <element T>
  static std::error_code decode(std::span<const std::byte> bytes, const layout& model, frame_view<T>& out) {
    if (bytes.size() < wire_header_bytes) return frame_errc::truncated;
    const wire_header header = read_header(bytes);
    if (const std::error_code bad = check_fields(header, element_code<T>)) return bad;
    if (header.fingerprint != model.fingerprint() || header.layers != model.layers())
      return frame_errc::wrong_layout;

    const bool is_part = (header.flags & flag_part) != 0;
    const bool is_last = (header.flags & flag_last_part) != 0;
    const std::size_t bitmaps_bytes = padded_bitmap_bytes(model.layers(), is_part);
    if (bytes.size() - wire_header_bytes < bitmaps_bytes) return frame_errc::truncated;
    const auto bitmaps = bytes.subspan(wire_header_bytes, bitmaps_bytes);
    const auto bitmap = bitmaps.first(bitmap_bytes(model.layers()));
    const auto decided = bitmaps.subspan(bitmap.size(), is_part ? bitmap.size() : 0);
    const auto padding = bitmaps.subspan(bitmap.size() + decided.size());
    if (!is_canonical(bitmap, model) || !is_zero(padding)) return frame_errc::bad_presence;
    if (is_part && !may_be_decided(decided, bitmap, is_last, model)) return frame_errc::bad_decided;

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
    const auto payload = bytes.subspan(wire_header_bytes + bitmaps_bytes);
    if (payload.size() < header.payload_bytes) return frame_errc::truncated;
    if (payload.size() > header.payload_bytes) return frame_errc::trailing_bytes;
    if (const std::error_code bad = check_checksum(header, bytes)) return bad;
    if (type == payload_type::as_is && reinterpret_cast<std::uintptr_t>(payload.data()) % alignof(T) != 0) {
      return frame_errc::misaligned_buffer;
    }

    out.is_ = {.kind = static_cast<frame_kind>(header.kind),
               .payload = type,
               .sender = header.sender,
               .run = header.run,
               .step = header.step,
               .is_part = is_part,
               .ends_step = !is_part || is_last,
               .part = header.part,
               .decided = decided,
               .model = model,
               .sent_elements = sent_elements,
               .bytes = payload,
               .begins = std::move(begins)};
    return {};
  }

  static std::error_code peek(std::span<const std::byte> bytes, frame_info& out) noexcept {
    if (bytes.size() < wire_header_bytes) return frame_errc::truncated;
    const wire_header header = read_header(bytes);
    const bool is_double = header.element_type == element_code<double>;
    if (const std::error_code bad =
            check_fields(header, is_double ? element_code<double> : element_code<float>)) {
      return bad;
    }
    const bool is_part = (header.flags & flag_part) != 0;
    // No overflow: two bitmaps of 2^64 layers take 2^62 bytes.
    const std::uint64_t prefix_bytes = wire_header_bytes + padded_bitmap_bytes(header.layers, is_part);
    if (prefix_bytes > largest_size || header.payload_bytes > largest_size - prefix_bytes)
      return frame_errc::bad_payload_size;
    out = {.size_bytes = static_cast<std::size_t>(prefix_bytes + header.payload_bytes),
           .kind = static_cast<frame_kind>(header.kind),
           .payload = static_cast<payload_type>(header.payload_type),
           .element_bytes = is_double ? sizeof(double) : sizeof(float),
           .sender = header.sender,
           .run = header.run,
           .step = header.step,
           .fingerprint = header.fingerprint,
           .layers = header.layers,
           .is_part = is_part,
           .ends_step = !is_part || (header.flags & flag_last_part) != 0,
           .part = header.part};
    return {};
  }

 private:
  // What a model's layers take may not fit in std::size_t, even if their number of elements does. No frame is that long.
  static constexpr std::size_t largest_size = (std::numeric_limits<std::size_t>::max)();

  static std::error_code check_fields(const wire_header& header, std::uint8_t own_element_type) noexcept {
    if (header.magic != wire_magic) return frame_errc::bad_magic;
    if (header.version != wire_version) return frame_errc::unsupported_version;
    if (header.element_type != own_element_type) return frame_errc::wrong_element_type;
    if (header.kind != static_cast<std::uint8_t>(frame_kind::gradients) &&
        header.kind != static_cast<std::uint8_t>(frame_kind::parameters) &&
        header.kind != static_cast<std::uint8_t>(frame_kind::updates)) {
      return frame_errc::unknown_kind;
    }
    if (header.payload_type > static_cast<std::uint8_t>(payload_type::int4))
      return frame_errc::unknown_payload_type;
    const bool is_whole = (header.flags & flag_part) == 0;
    if ((header.flags & ~flags_of_version_1) != 0 || header.reserved != 0 ||
        (is_whole && ((header.flags & flag_last_part) != 0 || header.part != 0))) {
      return frame_errc::nonzero_reserved;
    }
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

  static bool is_zero(std::span<const std::byte> bytes) noexcept {
    return std::ranges::all_of(bytes, [](std::byte each) { return each == std::byte{0}; });
  }

  // What is present is decided, and in the last part everything is.
  static bool may_be_decided(std::span<const std::byte> decided, std::span<const std::byte> present,
                             bool is_last, const layout& model) noexcept {
    if (!is_canonical(decided, model)) return false;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const bool must_be = is_present(present, l) || (is_last && model.sizes()[l] > 0);
      if (must_be && !is_present(decided, l)) return false;
    }
    return true;
  }

  static std::error_code check_checksum(const wire_header& header,
                                        std::span<const std::byte> bytes) noexcept {
    if ((header.flags & flag_checksum) == 0) {
      return header.checksum == 0 ? std::error_code{} : frame_errc::checksum_mismatch;
    }
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
#if LAMINA_HAS_EXCEPTIONS
  try {
    error = detail::frame_decoder::decode(bytes, model, view);
  } catch (const std::bad_alloc&) {
    error = std::make_error_code(std::errc::not_enough_memory);
  }
#else
  error = detail::frame_decoder::decode(bytes, model, view);  // without memory the program ends in `new`
#endif
  return view;
}

/// The same; throws decode_error.
template <element T>
[[nodiscard]] frame_view<T> decode(std::span<const std::byte> bytes, const layout& model) {
  std::error_code error;
  frame_view<T> view = decode<T>(bytes, model, error);
  if (error) detail::raise(decode_error(error));
  return view;
}

/// A frame that is gone when decode returns cannot be viewed: keep the bytes.
template <element T, std::same_as<std::vector<std::byte>> Gone>
frame_view<T> decode(Gone&&, const layout&) = delete;
template <element T, std::same_as<std::vector<std::byte>> Gone>
frame_view<T> decode(Gone&&, const layout&, std::error_code&) = delete;

/// What a frame says of itself, before its layout is known: for who reads frames from a stream, serves several models, or
/// keeps strangers out before memory is taken for them. Looks at the first peek_bytes, 64, and at nothing behind them.
/// `error` is set to a frame_errc, and the info returned then is empty: truncated, if there are fewer bytes, what decode()
/// says of the same header, or bad_payload_size, if the frame's size does not fit in std::size_t. Cost: constant, no
/// allocation.
///
/// The bytes may come from anybody, and no checksum holds yet: take memory for `size_bytes` only up to
/// largest_frame_bytes() of the layout that has this fingerprint. What decode() accepts has these fields.
inline frame_info peek(std::span<const std::byte> first_bytes, std::error_code& error) noexcept {
  frame_info info;
  error = detail::frame_decoder::peek(first_bytes, info);
  return info;
}

/// The same; throws decode_error.
[[nodiscard]] inline frame_info peek(std::span<const std::byte> first_bytes) {
  std::error_code error;
  const frame_info info = peek(first_bytes, error);
  if (error) detail::raise(decode_error(error));
  return info;
}

/// The same as expect() where a step may come in parts: step_parts then says whether a part is the next.
template <element T>
void expect_part(const frame_view<T>& frame, frame_kind kind, std::uint64_t step, std::error_code& error,
                 std::uint32_t run = 0) noexcept {
  error.clear();
  if (frame.kind() != kind) {
    error = frame_errc::unexpected_kind;
  } else if (frame.run() != run) {
    error = frame_errc::other_run;
  } else if (frame.step() != step) {
    error = frame_errc::unexpected_step;
  }
}

/// `error` is set to unexpected_kind, other_run or unexpected_step unless the frame is of this kind, run and step, to
/// unexpected_part if it is a part of a step, and cleared
/// if it is: late, early and replayed frames are refused by it. A frame that was under way when its sender was restarted has the
/// step of another, but not its run.
///
/// `run` is that of the sender's options; 0: the frame is of none.
template <element T>
void expect(const frame_view<T>& frame, frame_kind kind, std::uint64_t step, std::error_code& error,
            std::uint32_t run = 0) noexcept {
  expect_part(frame, kind, step, error, run);
  if (!error && frame.is_part()) error = frame_errc::unexpected_part;
}

namespace detail {

template <element T>
[[nodiscard]] std::string describe(const frame_view<T>& frame) {
  return "frame of sender " + std::to_string(frame.sender()) + ", step " + std::to_string(frame.step()) +
         (frame.run() == 0 ? "" : ", run " + std::to_string(frame.run())) +
         (frame.is_part() ? ", part " + std::to_string(frame.part()) : "");
}

template <element T>
[[noreturn]] void refuse(const std::error_code& error, const frame_view<T>& frame, std::uint64_t step,
                         std::uint32_t run) {
  raise(decode_error(error, describe(frame) + ", where one of step " + std::to_string(step) +
                                (run == 0 ? "" : ", run " + std::to_string(run)) + " is expected"));
}

}  // namespace detail

/// Both throw decode_error with the same codes.
template <element T>
void expect(const frame_view<T>& frame, frame_kind kind, std::uint64_t step, std::uint32_t run = 0) {
  std::error_code error;
  expect(frame, kind, step, error, run);
  if (error) detail::refuse(error, frame, step, run);
}
template <element T>
void expect_part(const frame_view<T>& frame, frame_kind kind, std::uint64_t step, std::uint32_t run = 0) {
  std::error_code error;
  expect_part(frame, kind, step, error, run);
  if (error) detail::refuse(error, frame, step, run);
}

}  // namespace lamina::inline LAMINA_ABI
