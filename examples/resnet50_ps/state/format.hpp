// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// The bytes of a checkpoint file, little-endian: a header, the sections one after the other, and the index (for each
/// section its length, its checksum, the length of its name, its name). Checksums are XXH3 with 64 bits.
namespace resnet50_ps {

struct checkpoint_header {
  std::uint64_t magic = 0x50434e494d414c89;  ///< the byte 89 and "LAMINCP": no text begins so
  std::uint32_t version = 1;
  std::uint32_t reserved = 0;
  std::uint64_t step = 0;
  std::uint64_t file_bytes = 0;
  std::uint64_t index_bytes = 0;
  std::uint64_t checksum = 0;  ///< of index and header; this field counts as zero
};
static_assert(sizeof(checkpoint_header) == 48);

/// Where a section stands.
struct checkpoint_section {
  std::size_t position = 0;  ///< in the order in which they were added
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
};

/// By name.
using checkpoint_index = std::map<std::string, checkpoint_section>;

/// Sections are summed in pieces of so many bytes, which are still in the cache when they are written.
constexpr std::size_t checkpoint_piece_bytes = std::size_t{1} << 20;

void append_to_index(std::vector<std::byte>& index, const std::string& name, std::uint64_t bytes,
                     std::uint64_t checksum);

/// nullopt unless it is whole, no name is in it twice, and its sections fill `section_bytes`.
std::optional<checkpoint_index> parse_index(std::span<const std::byte> index, std::uint64_t section_bytes);

/// What the header's field must be.
std::uint64_t checksum_of(checkpoint_header header, std::span<const std::byte> index);

}  // namespace resnet50_ps
