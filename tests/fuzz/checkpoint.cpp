// SPDX-License-Identifier: MIT
// Any bytes are a checkpoint of benchmarks/lab that can be read or are refused with a sentence; so is a packed
// message. What holds tensors in saved_run.cpp needs torch and is not here.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>

#include "fuzz.hpp"
#include "messages/link.hpp"
#include "state/checkpoint.hpp"

namespace lamina_fuzz {
namespace {

using lab::checkpoint;
using lab::checkpoint_header;

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

void sign(bytes& file) {
  checkpoint_header header;
  std::memcpy(&header, file.data(), sizeof header);
  header.checksum = 0;
  lamina::detail::checksum sum;
  sum.add(std::span(file).subspan(sizeof header));
  sum.add(std::as_bytes(std::span(&header, 1)));
  header.checksum = sum.value();
  std::memcpy(file.data(), &header, sizeof header);
}

void mend_checkpoint(bytes& file, std::size_t how) {
  checkpoint_header header;
  if (how == 0 || file.size() < sizeof header) return;
  std::memcpy(&header, file.data(), sizeof header);
  if (how > 1) {
    header.magic = checkpoint_header{}.magic;
    header.version = checkpoint_header{}.version;
    header.file_bytes = file.size();
  }
  std::memcpy(file.data(), &header, sizeof header);
  sign(file);
}

void check_file(const bytes& file) {
  const memory_file stored(file);
  std::optional<checkpoint> found;
  if (throws<std::runtime_error>([&] { found.emplace(stored.path()); })) return;
  std::size_t used = sizeof(checkpoint_header);
  for (const auto& [name, section] : found->sections()) {
    used += 2 * sizeof(std::uint64_t) + name.size() + section.size();
    bytes other(section.size() + 1);
    // By its own name: clang 14 captures no structured binding.
    check(throws<std::runtime_error>([&, &section_name = name] { found->read_into(section_name, other); }),
          "a section has its own length alone");
  }
  check(used == file.size(), "sections fill the file");
}

// What was written is read, and a byte that is damaged is seen.
void round_trip(input& in) {
  checkpoint_header header;
  header.step = in.value<std::uint64_t>();
  std::vector<bytes> sections(in.below(4));
  header.sections = static_cast<std::uint32_t>(sections.size());
  bytes file(sizeof header);
  for (std::size_t k = 0; k < sections.size(); ++k) {
    sections[k] = in.take(in.below(40));
    const std::string name = "section " + std::to_string(k);
    const std::array<std::uint64_t, 2> lengths = {name.size(), sections[k].size()};
    const auto append = [&](std::span<const std::byte> part) {
      file.insert(file.end(), part.begin(), part.end());
    };
    append(std::as_bytes(std::span(lengths)));
    append(std::as_bytes(std::span(name)));
    append(sections[k]);
  }
  header.file_bytes = file.size();
  std::memcpy(file.data(), &header, sizeof header);
  sign(file);
  {
    const memory_file stored(file);
    const checkpoint found(stored.path());
    check(found.step() == header.step && found.sections().size() == sections.size(), "the header is read");
    for (std::size_t k = 0; k < sections.size(); ++k) {
      check(std::ranges::equal(found["section " + std::to_string(k)], sections[k]),
            "a section is read as it was written");
    }
  }
  const std::size_t place = in.value<std::uint16_t>() % file.size();
  file[place] ^= static_cast<std::byte>(1 + in.below(255));
  const memory_file stored(file);
  check(throws<std::runtime_error>([&] { checkpoint read(stored.path()); }), "damage is seen");
}

void check_message(const bytes& packed) {
  std::vector<bytes> strings;
  if (throws<std::runtime_error>([&] { strings = lab::unpack(packed); })) return;
  check(lab::pack(strings) == packed, "a message is packed in one way");
}

}  // namespace

void fuzz_one(input in) {
  const std::size_t what = in.below(5);
  if (what == 0) return round_trip(in);
  if (what == 1) return check_message(in.take_rest());
  bytes file = in.take_rest();
  mend_checkpoint(file, what - 2);
  check_file(file);
}

}  // namespace lamina_fuzz
