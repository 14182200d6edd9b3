// SPDX-License-Identifier: MIT
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "lamina/detail/checksum.hpp"
#include "state/checkpoint.hpp"

namespace resnet50_ps {
namespace {

namespace fs = std::filesystem;
using lamina::detail::checksum;

std::string in_quotes(const std::string& name) {
  return "'" + name + "'";
}

}  // namespace

// Non-blocking: a pipe of that name is refused, not waited for.
checkpoint_reader::checkpoint_reader(fs::path file)
    : path_(std::move(file)), file_(files::open_to_read(path_, O_NONBLOCK)) {
  const checkpoint_header header = read_header();
  step_ = header.step;
  sections_ = read_index(header);
  verify_sections();
}

checkpoint_header checkpoint_reader::read_header() const {
  const struct stat status = files::status_of(file_, path_);
  if (!S_ISREG(status.st_mode)) refuse("is not a checkpoint");
  const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
  const checkpoint_header expected;
  checkpoint_header read;
  const std::size_t available = std::min<std::uint64_t>(file_bytes, sizeof read);
  read_at(0, std::as_writable_bytes(std::span(&read, 1)).first(available));
  if (std::memcmp(&read, &expected, std::min(available, sizeof read.magic)) != 0)
    refuse("is not a checkpoint");
  if (available < sizeof read) refuse("is truncated: it has no whole header");
  if (read.version > expected.version) {
    refuse("has format version " + std::to_string(read.version) + ", and this program reads up to " +
           std::to_string(expected.version));
  }
  if (read.file_bytes > file_bytes) {
    refuse("is truncated: it has " + std::to_string(file_bytes) + " of " + std::to_string(read.file_bytes) +
           " bytes");
  }
  const bool has_index = read.file_bytes >= sizeof read && read.index_bytes <= read.file_bytes - sizeof read;
  if (read.version != expected.version || read.reserved != 0 || read.file_bytes != file_bytes || !has_index) {
    refuse("is damaged: its header is wrong");
  }
  return read;
}

checkpoint_index checkpoint_reader::read_index(const checkpoint_header& header) const {
  std::vector<std::byte> bytes(header.index_bytes);
  read_at(header.file_bytes - header.index_bytes, bytes);
  if (header.checksum != checksum_of(header, bytes)) refuse("is damaged: the checksum of its index is wrong");
  auto sections = parse_index(bytes, header.file_bytes - header.index_bytes - sizeof header);
  if (!sections) refuse("is damaged: its index is wrong");
  return std::move(*sections);
}

void checkpoint_reader::verify_sections() const {
  std::vector<std::byte> buffer(checkpoint_piece_bytes);
  for (const auto& [name, each] : sections_) {
    checksum sum;
    for (std::uint64_t done = 0; done < each.bytes;) {
      const auto piece = std::span(buffer).first(std::min<std::uint64_t>(each.bytes - done, buffer.size()));
      read_at(each.offset + done, piece);
      sum.add(piece);
      done += piece.size();
    }
    if (sum.value() != each.checksum) {
      refuse("is damaged: the checksum of the section " + in_quotes(name) + " is wrong");
    }
  }
}

std::vector<std::string> checkpoint_reader::names() const {
  std::vector<std::string> names(sections_.size());
  for (const auto& [name, each] : sections_) names[each.position] = name;
  return names;
}

std::vector<std::byte> checkpoint_reader::read(const std::string& name) const {
  std::vector<std::byte> bytes(find(name).bytes);
  read_into(name, bytes);
  return bytes;
}

void checkpoint_reader::read_into(const std::string& name, std::span<std::byte> bytes) const {
  const checkpoint_section& found = find(name);
  if (bytes.size() != found.bytes) {
    refuse("has " + std::to_string(found.bytes) + " bytes in the section " + in_quotes(name) + ", not " +
           std::to_string(bytes.size()));
  }
  read_at(found.offset, bytes);
  // Once more, since the constructor kept none of what it read.
  checksum sum;
  sum.add(bytes);
  if (sum.value() != found.checksum) refuse("has changed in the section " + in_quotes(name));
}

void checkpoint_reader::read_at(std::uint64_t offset, std::span<std::byte> bytes) const {
  if (files::read_at(file_, path_, offset, bytes) < bytes.size()) {
    refuse("is truncated: it was cut while it was read");
  }
}

const checkpoint_section& checkpoint_reader::find(const std::string& name) const {
  const auto found = sections_.find(name);
  if (found == sections_.end()) refuse("has no section " + in_quotes(name));
  return found->second;
}

void checkpoint_reader::refuse(const std::string& why) const {
  throw std::runtime_error(path_.string() + " " + why);
}

}  // namespace resnet50_ps
