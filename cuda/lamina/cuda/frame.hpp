// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/checksum.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/error.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

/// The frame at the beginning of a buffer in host memory, which a device has written there without knowing how long it
/// would be: without what follows it, and with its checksum. Then it is the frame
/// that a lamina::gradient_compressor encodes, to the last byte. Throws decode_error if there is no whole frame; cost: one
/// read of it.
inline std::span<std::byte> finish_frame(std::span<std::byte> buffer) {
  using namespace lamina::detail;
  if (buffer.size() < wire_header_bytes) throw decode_error(frame_errc::truncated, "a device's frame");
  wire_header header = read_header(buffer);
  if (header.magic != wire_magic) throw decode_error(frame_errc::bad_magic, "a device's frame");
  const std::size_t prefix_bytes = wire_header_bytes + padded_bitmap_bytes(header.layers);
  if (prefix_bytes > buffer.size() || header.payload_bytes > buffer.size() - prefix_bytes) {
    throw decode_error(frame_errc::truncated, "a device's frame");
  }
  const auto frame = buffer.first(prefix_bytes + header.payload_bytes);
  header.flags |= flag_checksum;
  write_header(frame, header);
  checksum sum;
  sum.add(frame.first(checksum_offset));
  sum.add(frame.subspan(wire_header_bytes));
  header.checksum = sum.value();
  write_header(frame, header);
  return frame;
}

}  // namespace lamina::inline LAMINA_ABI::cuda
