// SPDX-License-Identifier: MIT
#include "state/format.hpp"

#include <bit>
#include <cstring>
#include <utility>

#include "lamina/detail/checksum.hpp"

namespace resnet50_ps {
namespace {

static_assert(lamina::detail::checksum::available,
              "checkpoints need xxhash.h, of the package libxxhash-dev on Debian and Ubuntu");
static_assert(std::endian::native == std::endian::little,
              "checkpoints are little-endian; this machine is not");

// The name follows it.
struct index_entry {
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
  std::uint64_t name_bytes = 0;
};
static_assert(sizeof(index_entry) == 24);

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

}  // namespace

void append_to_index(std::vector<std::byte>& index, const std::string& name, std::uint64_t bytes,
                     std::uint64_t checksum) {
  const index_entry entry{bytes, checksum, name.size()};
  for (const std::span<const std::byte> part : {bytes_of(entry), std::as_bytes(std::span(name))}) {
    index.insert(index.end(), part.begin(), part.end());
  }
}

// All lengths are held against those of the file before anything is done with them.
std::optional<checkpoint_index> parse_index(std::span<const std::byte> index, std::uint64_t section_bytes) {
  checkpoint_index sections;
  std::uint64_t offset = sizeof(checkpoint_header);
  while (!index.empty()) {
    index_entry entry;
    if (index.size() < sizeof entry) return std::nullopt;
    std::memcpy(&entry, index.data(), sizeof entry);
    index = index.subspan(sizeof entry);
    if (entry.name_bytes > index.size() || entry.bytes > section_bytes) return std::nullopt;
    std::string name(reinterpret_cast<const char*>(index.data()), entry.name_bytes);
    index = index.subspan(entry.name_bytes);
    const checkpoint_section added{sections.size(), offset, entry.bytes, entry.checksum};
    if (!sections.emplace(std::move(name), added).second) return std::nullopt;
    offset += entry.bytes;
    section_bytes -= entry.bytes;
  }
  return section_bytes == 0 ? std::optional(std::move(sections)) : std::nullopt;
}

std::uint64_t checksum_of(checkpoint_header header, std::span<const std::byte> index) {
  header.checksum = 0;
  lamina::detail::checksum sum;
  sum.add(index);
  sum.add(bytes_of(header));
  return sum.value();
}

}  // namespace resnet50_ps
