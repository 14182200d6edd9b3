// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/bounded/chunks.hpp"
#include "lamina/error.hpp"

/// The data packet, as docs/bounded-loss-protocol.md gives it: 56 bytes of header, then the elements of one chunk.
namespace lamina::inline LAMINA_ABI::bounded {

/// The check of packets and control messages: XXH3 of 64 bits, seeded with the secret of the run. It notices damage, and bytes of those
/// who do not know the secret; it is no MAC against somebody who reads the network. Allocates nothing.
class keyed_check {
 public:
  explicit keyed_check(std::uint64_t secret) noexcept : secret_(secret) {}

  /// Of these bytes as if they were joined.
  [[nodiscard]] std::uint64_t of(std::initializer_list<std::span<const std::byte>> pieces) noexcept {
    // The same seed as before, so that xxHash derives its own secret from it but once.
    XXH3_64bits_reset_withSeed(&state_, secret_);
    for (const auto piece : pieces)
      if (!piece.empty()) XXH3_64bits_update(&state_, piece.data(), piece.size());
    return XXH3_64bits_digest(&state_);
  }

 private:
  std::uint64_t secret_;
  XXH3_state_t state_{};  // zeros: xxHash looks at the seed that it had before
};

inline constexpr std::size_t packet_header_bytes = 56;
inline constexpr std::uint32_t packet_magic = 0x50414cf4;  // the bytes F4 'L' 'A' 'P'
inline constexpr std::uint8_t packet_version = 1;
inline constexpr std::uint8_t flag_repair = 1;       ///< a chunk of a fragment that is not in the frame
inline constexpr std::uint8_t flag_sent_before = 2;  ///< not for the first time in this transfer
/// What a packet takes on the wire without its datagram: Ethernet, IPv4 and UDP.
inline constexpr std::size_t packet_overhead_bytes = 42;

struct packet_header {
  std::uint32_t magic = packet_magic;
  std::uint8_t version = packet_version;
  std::uint8_t flags = 0;
  std::uint8_t tag = 0;
  std::uint8_t reserved = 0;
  std::uint16_t sender = 0;
  std::uint16_t receiver = 0;
  std::uint32_t transfer = 0;  // of this sender to this receiver, from 1; after 2^32 - 1 comes 1
  std::uint32_t fragment = 0;
  std::uint32_t chunk = 0;         // within the fragment
  std::uint32_t chunks = 0;        // of the fragment
  std::uint32_t transmission = 0;  // counts every packet of this transfer
  std::uint64_t offset = 0;        // the chunk's first element
  std::uint32_t data_bytes = 0;
  std::uint32_t sent_at = 0;  // microseconds of the sender's clock, wrapping
  std::uint64_t check = 0;
};
static_assert(sizeof(packet_header) == packet_header_bytes && offsetof(packet_header, transfer) == 12 &&
              offsetof(packet_header, offset) == 32 && offsetof(packet_header, check) == 48);

/// Writes the header, with the check over it and the data, which lie in one piece or in two. Allocates nothing.
inline std::array<std::byte, packet_header_bytes> write_packet_header(
    packet_header header, const std::array<std::span<const std::byte>, 2>& data,
    keyed_check& check) noexcept {
  auto bytes = std::bit_cast<std::array<std::byte, packet_header_bytes>>(header);
  header.check = check.of({std::span(bytes).first(offsetof(packet_header, check)), data[0], data[1]});
  std::memcpy(bytes.data() + offsetof(packet_header, check), &header.check, sizeof header.check);
  return bytes;
}

/// The header of a datagram, if that may be a packet at all. `error` is set to truncated, bad_magic, unsupported_version or
/// nonzero_reserved, in this order, and cleared otherwise. Looks at 56 bytes at most and computes no check.
inline packet_header read_packet_header(std::span<const std::byte> datagram,
                                        std::error_code& error) noexcept {
  packet_header header;
  error = datagram.size() < packet_header_bytes ? errc::truncated : std::error_code();
  if (error) return header;
  std::memcpy(&header, datagram.data(), sizeof header);
  constexpr unsigned known_flags = flag_repair | flag_sent_before;
  if (header.magic != packet_magic) {
    error = errc::bad_magic;
  } else if (header.version != packet_version) {
    error = errc::unsupported_version;
  } else if ((header.flags & ~known_flags) != 0 || header.tag > 7 || header.reserved != 0) {
    error = errc::nonzero_reserved;
  }
  return header;
}

/// Whether fragment, chunk, chunks, offset and lengths are those of the grid: no_such_chunk or wrong_sizes, if not. Computes no check.
inline std::error_code check_sizes(const packet_header& header, std::size_t datagram_bytes,
                                   const chunk_grid& grid) noexcept {
  if (!grid.has(header.fragment, header.chunk)) return errc::no_such_chunk;
  const std::size_t data_bytes = grid.data_bytes(header.fragment, header.chunk);
  if (header.chunks != grid.chunks(header.fragment) || header.offset != grid.begin(header.chunk) ||
      header.data_bytes != data_bytes || datagram_bytes - packet_header_bytes != data_bytes) {
    return errc::wrong_sizes;
  }
  return {};
}

/// Whether the check holds for a datagram of at least 56 bytes: over its first 48 and all that follow the header.
inline bool has_good_check(std::span<const std::byte> datagram, keyed_check& check) noexcept {
  std::uint64_t given = 0;
  std::memcpy(&given, datagram.data() + offsetof(packet_header, check), sizeof given);
  return given ==
         check.of({datagram.first(offsetof(packet_header, check)), datagram.subspan(packet_header_bytes)});
}

/// A packet to send: its header, and where its elements lie.
struct outgoing_packet {
  std::array<std::byte, packet_header_bytes> header{};
  std::array<std::span<const std::byte>, 2> data;  ///< one piece, of int8, int4 and ternary two
  std::uint8_t tag = 0;

  [[nodiscard]] std::size_t size_bytes() const noexcept {
    return header.size() + data[0].size() + data[1].size();
  }
};

/// What became of a datagram.
enum class packet_fate : std::uint8_t {
  placed,
  duplicate,  ///< seen before
  late,       ///< the transfer is frozen
  stale,      ///< of a transfer that is not open
  malformed,  ///< too short, another magic or version, unknown bits
  foreign,    ///< of another sender, or for another receiver
  bad_check,  ///< damaged, or without the secret
  inconsistent,  ///< a good check over what is not of this transfer: the peer is wrong, and the receiver has failed
};

/// Packets by their fate.
struct receiver_counters {
  std::array<std::uint64_t, 8> of_fate{};
  std::uint64_t hashed = 0;  ///< datagrams of which the check was computed

  [[nodiscard]] std::uint64_t of(packet_fate fate) const noexcept {
    return of_fate[static_cast<std::size_t>(fate)];
  }
};

}  // namespace lamina::inline LAMINA_ABI::bounded
