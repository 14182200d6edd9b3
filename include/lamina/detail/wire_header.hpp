// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "lamina/detail/abi.hpp"
#include "lamina/tensor.hpp"

/// The first 64 bytes of a frame, as docs/wire-format/index.md gives them.
namespace lamina::inline LAMINA_ABI::detail {

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

}  // namespace lamina::inline LAMINA_ABI::detail
