// SPDX-License-Identifier: MIT
// Any bytes are a checkpoint of examples/resnet50_ps that can be read or are refused with a sentence; so are an index and
// a packed message. What holds tensors in saved_run.cpp needs torch and is not here.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "fuzz.hpp"
#include "messages/link.hpp"
#include "state/checkpoint.hpp"

namespace lamina_fuzz {
namespace {

using resnet50_ps::checkpoint_header;
using resnet50_ps::checkpoint_reader;

// A file in memory, by a path.
class memory_file {
 public:
  explicit memory_file(std::span<const std::byte> contents) : number_(memfd_create("checkpoint", 0)) {
    check(number_ >= 0 && write(number_, contents.data(), contents.size()) == std::ssize(contents),
          "the system gives a file");
  }
  ~memory_file() { close(number_); }
  memory_file(const memory_file&) = delete;
  memory_file& operator=(const memory_file&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(number_); }

 private:
  int number_;
};

void mend_checkpoint(bytes& file, std::size_t how) {
  checkpoint_header header;
  if (how == 0 || file.size() < sizeof header) return;
  std::memcpy(&header, file.data(), sizeof header);
  if (how > 1) {
    header.magic = checkpoint_header{}.magic;
    header.version = checkpoint_header{}.version;
    header.file_bytes = file.size();
  }
  if (header.file_bytes <= file.size() && header.index_bytes <= file.size() - sizeof header) {
    header.checksum = checksum_of(header, std::span(file).last(header.index_bytes));
  }
  std::memcpy(file.data(), &header, sizeof header);
}

std::uint64_t sum_of(std::span<const std::byte> section) {
  lamina::detail::checksum sum;
  sum.add(section);
  return sum.value();
}

// What is accepted is the only way of writing it.
void check_index(std::span<const std::byte> index, std::uint64_t section_bytes) {
  const auto sections = resnet50_ps::parse_index(index, section_bytes);
  if (!sections) return;
  std::vector<std::pair<std::string, resnet50_ps::checkpoint_section>> in_order(sections->begin(),
                                                                                sections->end());
  std::ranges::sort(in_order, {}, [](const auto& each) { return each.second.position; });
  bytes again;
  std::uint64_t offset = sizeof(checkpoint_header);
  for (const auto& [name, section] : in_order) {
    check(section.offset == offset, "sections lie one behind the other");
    offset += section.bytes;
    resnet50_ps::append_to_index(again, name, section.bytes, section.checksum);
  }
  check(offset == sizeof(checkpoint_header) + section_bytes, "sections fill their room");
  check(std::ranges::equal(again, index), "an index is written in one way");
}

void check_file(const bytes& file) {
  const memory_file stored(file);
  std::optional<checkpoint_reader> reader;
  if (throws<std::runtime_error>([&] { reader.emplace(stored.path()); })) return;
  check(
      throws<std::runtime_error>([&] { reader->read("no such section"); }) || reader->has("no such section"),
      "a missing section is refused");
  std::size_t section_bytes = 0;
  for (const std::string& name : reader->names()) {
    const bytes section = reader->read(name);
    section_bytes += section.size();
    bytes other(section.size() + 1);
    check(throws<std::runtime_error>([&] { reader->read_into(name, other); }),
          "a section has its own length alone");
  }
  check(sizeof(checkpoint_header) + section_bytes <= file.size(), "sections lie in the file");
}

// What was written is read, and a byte that is damaged is seen.
void round_trip(input& in) {
  bytes file(sizeof(checkpoint_header));
  bytes index;
  std::vector<bytes> sections(in.below(4));
  for (std::size_t k = 0; k < sections.size(); ++k) {
    sections[k] = in.take(in.below(40));
    resnet50_ps::append_to_index(index, "section " + std::to_string(k), sections[k].size(),
                                 sum_of(sections[k]));
    file.insert(file.end(), sections[k].begin(), sections[k].end());
  }
  file.insert(file.end(), index.begin(), index.end());
  checkpoint_header header;
  header.step = in.value<std::uint64_t>();
  header.file_bytes = file.size();
  header.index_bytes = index.size();
  header.checksum = checksum_of(header, index);
  std::memcpy(file.data(), &header, sizeof header);
  {
    const memory_file stored(file);
    const checkpoint_reader reader(stored.path());
    check(reader.step() == header.step && reader.names().size() == sections.size(), "the header is read");
    for (std::size_t k = 0; k < sections.size(); ++k) {
      check(reader.read("section " + std::to_string(k)) == sections[k],
            "a section is read as it was written");
    }
  }
  const std::size_t place = in.value<std::uint16_t>() % file.size();
  file[place] ^= static_cast<std::byte>(1 + in.below(255));
  const memory_file stored(file);
  check(throws<std::runtime_error>([&] { checkpoint_reader reader(stored.path()); }), "damage is seen");
}

void check_message(const bytes& packed) {
  std::vector<bytes> strings;
  if (throws<std::runtime_error>([&] { strings = resnet50_ps::unpack(packed); })) return;
  check(resnet50_ps::pack(strings) == packed, "a message is packed in one way");
}

}  // namespace

void fuzz_one(input in) {
  const std::size_t what = in.below(6);
  if (what == 0) return round_trip(in);
  if (what == 1) return check_message(in.take_rest());
  if (what == 2) {
    const auto section_bytes = in.value<std::uint64_t>();
    return check_index(in.take_rest(), section_bytes);
  }
  bytes file = in.take_rest();
  mend_checkpoint(file, what - 3);
  check_file(file);
}

}  // namespace lamina_fuzz
