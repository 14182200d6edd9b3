// SPDX-License-Identifier: MIT
#include "state/checkpoint.hpp"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>

#include "catch.hpp"
#include "lamina/detail/checksum.hpp"
#include "temporary_directory.hpp"

namespace {

namespace fs = std::filesystem;
using lab::checkpoint;
using lab::checkpoint_section;
using lab::newest_checkpoint;
using byte_vector = std::vector<std::byte>;
using name_list = std::vector<std::string>;

// ---- Helpers ----

/// Bytes that are different for every seed.
byte_vector noise(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  byte_vector result(bytes);
  for (std::size_t done = 0; done < bytes; done += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(result.data() + done, &word, std::min(sizeof word, bytes - done));
  }
  return result;
}

byte_vector read(const checkpoint& from, const std::string& section) {
  const auto bytes = from[section];
  return {bytes.begin(), bytes.end()};
}

/// In the order of the names.
name_list names_in(const checkpoint& from) {
  name_list names;
  for (const auto& [name, bytes] : from.sections()) names.push_back(name);
  return names;
}

void write_checkpoint(const fs::path& directory, std::uint64_t step, std::size_t bytes = 1000) {
  const byte_vector section = noise(bytes, step);
  const std::array<checkpoint_section, 2> sections = {
      {{"noise", section}, {"step", std::as_bytes(std::span(&step, 1))}}};
  lab::write_checkpoint(directory, step, sections);
}

/// Whether it is one of write_checkpoint, whole.
bool holds_its_step(const checkpoint& found, std::size_t bytes = 1000) {
  std::uint64_t step = 0;
  found.read_into("step", std::as_writable_bytes(std::span(&step, 1)));
  return names_in(found) == name_list{"noise", "step"} && read(found, "noise") == noise(bytes, step) &&
         found.step() == step;
}
bool holds_its_step(const fs::path& file, std::size_t bytes = 1000) {
  return holds_its_step(checkpoint(file), bytes);
}

name_list files_of(const fs::path& directory) {
  name_list names;
  for (const auto& entry : fs::directory_iterator(directory))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::string name_of(std::uint64_t step) {
  std::string digits = std::to_string(step);
  return "checkpoint-" + std::string(12 - digits.size(), '0') + digits + ".lamina";
}

name_list names_of(const std::vector<std::uint64_t>& steps) {
  name_list names;
  for (const std::uint64_t step : steps) names.push_back(name_of(step));
  return names;
}

byte_vector contents_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

/// A new file, since some file systems flush one that is cut and written again, which takes milliseconds.
void write_file(const fs::path& file, std::span<const std::byte> bytes) {
  fs::remove(file);
  std::ofstream(file, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

/// In the place where the file is.
void damage_first_section(const fs::path& file) {
  std::fstream stream(file, std::ios::binary | std::ios::in | std::ios::out);
  stream.seekg(80);
  const int byte = stream.get();
  stream.seekp(80).put(static_cast<char>(byte ^ 1));
}

/// What the exception of type `error` says that `action` throws; empty if it throws none.
template <typename error, typename function>
std::string message_of(function action) {
  try {
    action();
  } catch (const error& thrown) {
    return thrown.what();
  }
  return {};
}

/// What a reader says to the file; empty if it takes it.
std::string refusal_of(const fs::path& file) {
  return message_of<std::runtime_error>([&] { checkpoint{file}; });
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The newest checkpoint, of which none may have been skipped.
fs::path newest_without_fault(const fs::path& directory) {
  name_list faults;
  const auto newest =
      newest_checkpoint(directory, [&](const std::string& fault) { faults.push_back(fault); });
  CHECK(faults == name_list{});
  return newest ? newest->file() : fs::path();
}

/// A pipe whose ends close with it.
class pipe_ends {
 public:
  pipe_ends() {
    if (::pipe(ends_.data()) == -1) throw std::runtime_error("pipe failed");
  }
  ~pipe_ends() {
    ::close(ends_[0]);
    if (ends_[1] != -1) ::close(ends_[1]);
  }
  pipe_ends(const pipe_ends&) = delete;
  pipe_ends& operator=(const pipe_ends&) = delete;

  void write(std::span<const std::byte> bytes) const {
    if (::write(ends_[1], bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) _exit(3);
  }

  /// All that was written until every copy of the writing end is closed.
  byte_vector read_all() {
    ::close(std::exchange(ends_[1], -1));
    byte_vector all;
    std::array<std::byte, 4096> buffer;
    for (ssize_t count = 0; (count = ::read(ends_[0], buffer.data(), buffer.size())) > 0;) {
      all.insert(all.end(), buffer.begin(), buffer.begin() + count);
    }
    return all;
  }

 private:
  std::array<int, 2> ends_{};
};

/// Forks; the child runs `action` and ends, without what the parent's objects do when they end.
template <typename function>
pid_t start_child(function action) {
  const pid_t child = ::fork();
  if (child == -1) throw std::runtime_error("fork failed");
  if (child != 0) return child;
  try {
    action();
  } catch (...) {
    _exit(2);
  }
  _exit(0);
}

int wait_for(pid_t child) {
  int status = 0;
  if (::waitpid(child, &status, 0) != child) throw std::runtime_error("waitpid failed");
  return status;
}

/// What `action` returns in a process of its own, where limits and identity can be changed.
template <typename function>
std::string in_child(function action) {
  pipe_ends result;
  const pid_t child = start_child([&] {
    std::string text;
    try {
      text = action();
    } catch (const std::exception& error) {
      text = std::string("exception: ") + error.what();
    }
    result.write(std::as_bytes(std::span(text)));
  });
  const byte_vector bytes = result.read_all();
  const int status = wait_for(child);
  if (status != 0) return "the child ended with status " + std::to_string(status);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// ---- What is written is read ----

TEST_CASE("checkpoint: sections come back as they were") {
  const temporary_directory directory;
  const std::string odd("line\nand zero\0", 14);
  const byte_vector b = noise(1000, 1);
  const byte_vector a = noise(1, 2);
  const byte_vector nameless = noise(3, 3);
  const std::array<checkpoint_section, 5> sections = {
      {{"b", b}, {"empty", {}}, {"a", a}, {"", nameless}, {odd, b}}};
  lab::write_checkpoint(directory.path(), 42, sections);
  REQUIRE(files_of(directory.path()) == name_list{"checkpoint-000000000042.lamina"});
  const checkpoint found(directory.path() / name_of(42));
  CHECK(found.step() == 42);
  CHECK(names_in(found) == name_list{"", "a", "b", "empty", odd});
  CHECK(read(found, "b") == b);
  CHECK(read(found, "empty").empty());
  CHECK(read(found, "a") == a);
  CHECK(read(found, "") == nameless);
  CHECK(read(found, odd) == b);
}

TEST_CASE("checkpoint: no sections at all") {
  const temporary_directory directory;
  lab::write_checkpoint(directory.path(), 0, {});
  const checkpoint found(newest_without_fault(directory.path()));
  CHECK(found.step() == 0);
  CHECK(found.sections().empty());
}

TEST_CASE("checkpoint: many sections, and one of 64 MB and one byte more than a piece") {
  const temporary_directory directory;
  std::vector<byte_vector> contents = {noise(64'000'003, 1), noise((std::size_t{1} << 20) + 1, 2)};
  for (std::size_t i = 2; i < 5000; ++i) contents.push_back(noise(i % 17, i));
  std::vector<checkpoint_section> sections;
  for (std::size_t i = 0; i < contents.size(); ++i)
    sections.push_back({"section " + std::to_string(i), contents[i]});
  lab::write_checkpoint(directory.path(), 1, sections);
  const checkpoint found(newest_without_fault(directory.path()));
  REQUIRE(found.sections().size() == 5000);
  std::size_t wrong = 0;
  for (const checkpoint_section& each : sections) wrong += !std::ranges::equal(found[each.name], each.bytes);
  CHECK(wrong == 0);
}

TEST_CASE("checkpoint: steps beyond the padding are ordered as numbers") {
  const temporary_directory directory;
  for (const std::uint64_t step : {std::uint64_t{999'999'999'999}, std::uint64_t{1'000'000'000'000},
                                   std::numeric_limits<std::uint64_t>::max()}) {
    write_checkpoint(directory.path(), step);
    CHECK(checkpoint(newest_without_fault(directory.path())).step() == step);
  }
  CHECK(files_of(directory.path()) ==
        name_list{"checkpoint-1000000000000.lamina", "checkpoint-18446744073709551615.lamina"});
}

TEST_CASE("checkpoint: what it does not have is named") {
  const temporary_directory directory;
  write_checkpoint(directory.path(), 7);
  const fs::path file = directory.path() / name_of(7);
  const checkpoint found(file);
  CHECK(message_of<std::runtime_error>([&] { static_cast<void>(found["residual"]); }) ==
        file.string() + " has no section 'residual'");
  byte_vector four(4);
  CHECK(message_of<std::runtime_error>([&] { found.read_into("step", four); }) ==
        file.string() + " has 8 bytes in the section 'step', not 4");
  const fs::path missing = directory.path() / "nowhere";
  CHECK(refusal_of(missing) == "cannot open " + missing.string() + ": No such file or directory");
}

TEST_CASE("checkpoint: two sections of a name are refused, and nothing is left") {
  const temporary_directory directory;
  const std::array<checkpoint_section, 2> sections = {{{"a", {}}, {"a", {}}}};
  CHECK_THROWS_AS(lab::write_checkpoint(directory.path(), 7, sections), std::invalid_argument);
  CHECK(files_of(directory.path()).empty());
}

// ---- Damage ----

TEST_CASE("checkpoint: every truncation is refused") {
  const temporary_directory directory;
  write_checkpoint(directory.path(), 7, 50);
  const fs::path file = directory.path() / name_of(7);
  const byte_vector whole = contents_of(file);
  REQUIRE(whole.size() == 40 + 2 * 16 + 5 + 4 + 50 + 8);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    write_file(file, std::span(whole).first(bytes));
    INFO("cut after " << bytes << " bytes");
    CHECK(contains(refusal_of(file), "is truncated: it has "));
  }
  byte_vector longer = whole;
  longer.push_back(std::byte{0});
  write_file(file, longer);
  CHECK(contains(refusal_of(file), "is damaged"));
  write_file(file, whole);
  CHECK(holds_its_step(file, 50));
}

TEST_CASE("checkpoint: every flipped bit is refused") {
  const temporary_directory directory;
  write_checkpoint(directory.path(), 7, 50);
  const fs::path file = directory.path() / name_of(7);
  const byte_vector whole = contents_of(file);
  for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
    byte_vector damaged = whole;
    damaged[bit / 8] ^= std::byte{1} << (bit % 8);
    write_file(file, damaged);
    INFO("bit " << bit % 8 << " of byte " << bit / 8);
    const std::string refusal = refusal_of(file);
    CHECK(contains(refusal, bit / 8 < 8    ? "is not a checkpoint"
                            : bit / 8 < 40 ? " "
                                           : "is damaged: its checksum is wrong"));
  }
}

TEST_CASE("checkpoint: what is no checkpoint is named so") {
  const temporary_directory directory;
  const fs::path file = directory.path() / "file";
  write_file(file, std::as_bytes(std::span("A text that is longer than the header of a checkpoint is.")));
  CHECK(refusal_of(file) == file.string() + " is not a checkpoint");
  write_file(file, byte_vector(4096));
  CHECK(refusal_of(file) == file.string() + " is not a checkpoint");
  CHECK(contains(refusal_of(directory.path()), "is not a checkpoint"));
  const fs::path fifo = directory.path() / "fifo";
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  CHECK(contains(refusal_of(fifo), "is not a checkpoint"));
}

TEST_CASE("checkpoint: another format version is named so") {
  const temporary_directory directory;
  write_checkpoint(directory.path(), 7);
  const fs::path file = directory.path() / name_of(7);
  byte_vector bytes = contents_of(file);
  bytes[8] = std::byte{3};
  write_file(file, bytes);
  CHECK(refusal_of(file) == file.string() + " has format version 3, and this program reads 2");
}

/// Puts a right checksum on what is wrong.
void sign(byte_vector& file) {
  std::memset(file.data() + 32, 0, 8);
  lamina::detail::checksum sum;
  sum.add(std::span(file).subspan(40));
  sum.add(std::span(file).first(40));
  const std::uint64_t value = sum.value();
  std::memcpy(file.data() + 32, &value, sizeof value);
}

TEST_CASE("checkpoint: lengths beyond the file are refused, even with a right checksum") {
  const temporary_directory directory;
  write_checkpoint(directory.path(), 7, 50);
  const fs::path file = directory.path() / name_of(7);
  const byte_vector whole = contents_of(file);
  const std::size_t first = 40;
  const std::size_t second = first + 16 + 5 + 50;
  constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  for (const std::size_t field : {std::size_t{24}, first, first + 8, second, second + 8}) {
    std::uint64_t right = 0;
    std::memcpy(&right, whole.data() + field, sizeof right);
    for (const std::uint64_t wrong : {std::uint64_t{0}, right - 1, right + 1, std::uint64_t{1} << 40,
                                      std::uint64_t{1} << 63, most - right, most - 40, most}) {
      byte_vector bytes = whole;
      std::memcpy(bytes.data() + field, &wrong, sizeof wrong);
      sign(bytes);
      write_file(file, bytes);
      INFO(wrong << " in the place of " << right << " at " << field);
      CHECK(message_of<std::runtime_error>([&] { checkpoint{file}; }) != "");
    }
  }
}

TEST_CASE("checkpoint: random damage with a right checksum is refused or harmless") {
  const temporary_directory directory;
  write_checkpoint(directory.path(), 7, 50);
  const fs::path file = directory.path() / name_of(7);
  const byte_vector whole = contents_of(file);
  std::mt19937 random(1);
  std::size_t refused = 0;
  for (int round = 0; round < 1000; ++round) {
    byte_vector bytes = whole;
    for (int change = 0; change < 3; ++change) {
      bytes[12 + random() % (bytes.size() - 12)] = std::byte(random());
    }
    sign(bytes);
    write_file(file, bytes);
    refused += !refusal_of(file).empty();
  }
  // Whoever signs what is in a section is believed, and most of the file is that; but nothing else goes wrong.
  CHECK(refused > 500);
}

// ---- The newest, and which are kept ----

TEST_CASE("checkpoint: the newest two are kept") {
  const temporary_directory directory;
  write_file(directory.path() / "notes.txt", noise(10, 1));
  write_file(directory.path() / "checkpoint-1.lamina", noise(10, 1));
  for (std::uint64_t step = 1; step <= 5; ++step) {
    write_checkpoint(directory.path(), step * 10);
    name_list expected = step == 1 ? names_of({10}) : names_of({step * 10 - 10, step * 10});
    expected.push_back("checkpoint-1.lamina");
    expected.push_back("notes.txt");
    REQUIRE(files_of(directory.path()) == expected);
  }
  CHECK(newest_without_fault(directory.path()) == directory.path() / name_of(50));
  CHECK(holds_its_step(directory.path() / name_of(40)));
}

TEST_CASE("checkpoint: of the same step the later one is kept") {
  const temporary_directory directory;
  write_checkpoint(directory.path(), 10, 100);
  write_checkpoint(directory.path(), 10, 200);
  CHECK(files_of(directory.path()) == names_of({10}));
  CHECK(holds_its_step(newest_without_fault(directory.path()), 200));
}

TEST_CASE("checkpoint: a damaged one is skipped with its reason, and does not push out a good one") {
  const temporary_directory directory;
  write_checkpoint(directory.path(), 10);
  write_checkpoint(directory.path(), 30);
  damage_first_section(directory.path() / name_of(30));
  name_list faults;
  const auto newest =
      newest_checkpoint(directory.path(), [&](const std::string& fault) { faults.push_back(fault); });
  REQUIRE(newest);
  CHECK(newest->file() == directory.path() / name_of(10));
  CHECK(faults ==
        name_list{(directory.path() / name_of(30)).string() + " is damaged: its checksum is wrong"});

  write_checkpoint(directory.path(), 20);
  CHECK(files_of(directory.path()) == names_of({10, 20, 30}));
  write_checkpoint(directory.path(), 25);
  CHECK(files_of(directory.path()) == names_of({20, 25, 30}));
  write_checkpoint(directory.path(), 40);
  write_checkpoint(directory.path(), 50);
  CHECK(files_of(directory.path()) == names_of({40, 50}));
}

TEST_CASE("checkpoint: one of a lower step is kept beside a newer one") {
  const temporary_directory directory;
  write_checkpoint(directory.path(), 100);
  write_checkpoint(directory.path(), 10);
  write_checkpoint(directory.path(), 20);
  CHECK(files_of(directory.path()) == names_of({20, 100}));
}

TEST_CASE("checkpoint: no directory, none in it, and a file in its place") {
  const temporary_directory directory;
  CHECK_FALSE(newest_checkpoint(directory.path()));
  CHECK_FALSE(newest_checkpoint(directory.path() / "nowhere"));
  const fs::path file = directory.path() / "file";
  write_file(file, noise(10, 1));
  const std::string reason = file.string() + ": Not a directory";
  CHECK(contains(message_of<std::runtime_error>([&] { newest_checkpoint(file); }), reason));
  CHECK(contains(message_of<std::runtime_error>([&] { write_checkpoint(file, 1); }), reason));
  CHECK(contains(message_of<std::runtime_error>([&] { write_checkpoint(file / "below", 1); }), reason));
  CHECK(files_of(directory.path()) == name_list{"file"});
}

TEST_CASE("checkpoint: missing directories are made") {
  const temporary_directory directory;
  write_checkpoint(directory.path() / "a" / "b" / "", 1);
  write_checkpoint(directory.path() / "a" / "b", 2);
  CHECK(files_of(directory.path() / "a" / "b") == names_of({1, 2}));
}

TEST_CASE("checkpoint: what a killed writer has left is written over, and a living one is not disturbed") {
  const temporary_directory directory;
  const fs::path unfinished = directory.path() / "checkpoint.tmp";
  write_file(unfinished, noise(5000, 1));  // more than the next one needs
  CHECK_FALSE(newest_checkpoint(directory.path()));
  write_checkpoint(directory.path(), 1);
  CHECK(files_of(directory.path()) == names_of({1}));
  CHECK(holds_its_step(directory.path() / name_of(1)));

  write_file(unfinished, noise(10, 1));
  const int living = ::open(unfinished.c_str(), O_WRONLY);
  REQUIRE(::flock(living, LOCK_EX) == 0);
  CHECK(message_of<std::runtime_error>([&] { write_checkpoint(directory.path(), 2); }) ==
        directory.path().string() + " is being written to by another run");
  CHECK(contents_of(unfinished) == noise(10, 1));
  ::close(living);
  write_checkpoint(directory.path(), 2);
  CHECK(files_of(directory.path()) == names_of({1, 2}));
}

// ---- Failures of the system ----

/// Two good checkpoints, and a third that cannot be written for `reason`. Empty if all is as it should be. Of the
/// third's section the last write is cut short and is then to go on, which fails.
std::string write_two_and_fail(const fs::path& directory, std::size_t bytes, const std::string& reason) {
  write_checkpoint(directory, 1, 100'000);
  write_checkpoint(directory, 2, 100'000);
  const std::string message = message_of<std::runtime_error>([&] { write_checkpoint(directory, 3, bytes); });
  if (!contains(message, reason)) return "said: " + message;
  if (!contains(message, (directory / "checkpoint.tmp").string()))
    return "does not name the file: " + message;
  if (files_of(directory) != names_of({1, 2})) return "other files than the two are left";
  if (!holds_its_step(directory / name_of(1), 100'000)) return "the first is damaged";
  if (!holds_its_step(newest_checkpoint(directory).value(), 100'000)) return "the second is damaged";
  write_checkpoint(directory, 4, 100'000);
  return files_of(directory) == names_of({2, 4}) ? "" : "no checkpoint after the failed one";
}

TEST_CASE("checkpoint: a file beyond the process's limit") {
  const temporary_directory directory;
  CHECK(in_child([&]() -> std::string {
          const rlimit limit{1'500'000, 1'500'000};
          if (::signal(SIGXFSZ, SIG_IGN) == SIG_ERR || ::setrlimit(RLIMIT_FSIZE, &limit) == -1) {
            return "the limit cannot be set";
          }
          return write_two_and_fail(directory.path(), 1'900'000, "cannot write");
        }) == "");
}

bool write_text(const fs::path& file, const std::string& text) {
  return (std::ofstream(file) << text << std::flush).good();
}

/// Makes whoever is not root the root of a namespace of his own, where the system allows that.
bool become_able_to_mount() {
  const std::string user = std::to_string(::geteuid());
  const std::string group = std::to_string(::getegid());
  if (user == "0") return ::unshare(CLONE_NEWNS) == 0;
  return ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && write_text("/proc/self/setgroups", "deny") &&
         write_text("/proc/self/uid_map", "0 " + user + " 1") &&
         write_text("/proc/self/gid_map", "0 " + group + " 1");
}

/// A disk of 1 MiB that ends with the process.
bool mount_small_disk(const fs::path& directory) {
  return become_able_to_mount() && ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("tmpfs", directory.c_str(), "tmpfs", 0, "size=1m") == 0;
}

void check_on_small_disk(const std::string& test, std::string (*action)(const fs::path&)) {
  const temporary_directory directory;
  const std::string result = in_child([&] {
    if (!mount_small_disk(directory.path())) return std::string("no mount: ") + std::strerror(errno);
    return action(directory.path());
  });
  if (result.starts_with("no mount: ")) {
    WARN(test << ": skipped, " << result);
  } else {
    CHECK(result == "");
  }
}

TEST_CASE("checkpoint: a full disk") {
  check_on_small_disk("checkpoint: a full disk", [](const fs::path& directory) {
    return write_two_and_fail(directory, 1'000'000, "the disk is full (No space left on device)");
  });
}

// The space ends in the header, in a name, in a section or not at all.
std::string fill_by_pages(const fs::path& directory) {
  write_checkpoint(directory, 1, 1000);
  const std::string name(5000, 'n');
  std::size_t failures = 0;
  for (std::size_t free_pages = 0; free_pages < 8; ++free_pages) {
    const fs::path filler = directory / "filler";
    std::ofstream(filler, std::ios::binary) << std::string(2'000'000, 'x') << std::flush;
    fs::resize_file(filler, fs::file_size(filler) - free_pages * 4096);
    const std::string message = message_of<std::runtime_error>([&] {
      const byte_vector section = noise(9000, 2);
      const std::array<checkpoint_section, 1> sections = {{{name, section}}};
      lab::write_checkpoint(directory, 2, sections);
    });
    fs::remove(filler);
    failures += !message.empty();
    if (message.empty() != fs::remove(directory / name_of(2))) return "committed, and said: " + message;
    if (!message.empty() && !contains(message, "the disk is full")) return "said: " + message;
    if (files_of(directory) != names_of({1}) || !holds_its_step(directory / name_of(1))) return "damage";
  }
  return failures > 2 && failures < 8 ? "" : "refused in " + std::to_string(failures) + " of 8";
}

TEST_CASE("checkpoint: a disk that is full to the last page") {
  check_on_small_disk("checkpoint: a disk that is full to the last page", fill_by_pages);
}

TEST_CASE("checkpoint: a directory that is not writable") {
  const temporary_directory directory;
  const fs::path closed = directory.path() / "closed";
  write_checkpoint(closed, 1);
  fs::permissions(directory.path(), fs::perms(0755));
  fs::permissions(closed, fs::perms(0555));
  const std::string message = in_child([&]() -> std::string {
    // To root every directory is writable.
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) == -1) return "cannot become another user";
    return message_of<std::runtime_error>([&] { write_checkpoint(closed, 2); }) + "\n" +
           message_of<std::runtime_error>([&] { write_checkpoint(closed / "below", 2); });
  });
  fs::permissions(closed, fs::perms(0755));
  CHECK(contains(message, "cannot create " + (closed / "checkpoint.tmp").string()));
  CHECK(contains(message, ": Permission denied\n"));
  CHECK(
      contains(message, "cannot make the directory " + (closed / "below").string() + ": Permission denied"));
  CHECK(files_of(closed) == names_of({1}));
}

// ---- Killed writers ----

TEST_CASE("checkpoint: a writer that is killed at any time") {
  constexpr std::size_t bytes = 1'000'000;
  const temporary_directory directory;
  write_checkpoint(directory.path(), 1, bytes);
  std::uint64_t step = 1;
  std::mt19937 random(1);
  std::size_t interrupted = 0;
  for (int round = 0; round < 50; ++round) {
    pipe_ends done;
    const pid_t child = start_child([&, next = step + 1]() mutable {
      for (;; ++next) {
        write_checkpoint(directory.path(), next, bytes);
        done.write(std::as_bytes(std::span(&next, 1)));
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));
    ::kill(child, SIGKILL);
    REQUIRE(WTERMSIG(wait_for(child)) == SIGKILL);
    const byte_vector reports = done.read_all();
    REQUIRE(reports.size() % sizeof step == 0);
    step += reports.size() / sizeof step;

    const fs::path newest = newest_without_fault(directory.path());
    REQUIRE(newest != fs::path());
    const std::uint64_t found = checkpoint(newest).step();
    // It may have been killed between the commit and the report.
    REQUIRE((found == step || found == step + 1));
    REQUIRE(holds_its_step(newest, bytes));
    if (found > 1) REQUIRE(holds_its_step(directory.path() / name_of(found - 1), bytes));
    const auto files = files_of(directory.path());
    const auto temporary = std::count_if(files.begin(), files.end(),
                                         [](const std::string& name) { return !name.ends_with(".lamina"); });
    REQUIRE(temporary <= 1);
    interrupted += temporary == 1;
    step = found;
  }
  INFO(interrupted << " of 50 were killed while they wrote, and the last step is " << step);
  CHECK(interrupted > 0);
  write_checkpoint(directory.path(), step + 1, bytes);
  CHECK(files_of(directory.path()) == names_of({step, step + 1}));
}

/// One system call, of those that decide what lasts; empty for all others.
std::string lasting_call(pid_t child, const __ptrace_syscall_info& call) {
  switch (call.entry.nr) {
    case SYS_fsync: {
      const fs::path number = std::to_string(call.entry.args[0]);
      return fs::is_directory(fs::path("/proc") / std::to_string(child) / "fd" / number) ? "sync directory"
                                                                                         : "sync file";
    }
#ifdef SYS_rename
    case SYS_rename:
#endif
#ifdef SYS_renameat
    case SYS_renameat:
#endif
    case SYS_renameat2:
      return "rename";
#ifdef SYS_unlink
    case SYS_unlink:
#endif
    case SYS_unlinkat:
      return "remove";
    case SYS_pwrite64:
    case SYS_write:
      return "write";
    default:
      return {};
  }
}

struct traced_run {
  bool is_possible = true;
  bool was_killed = false;
  name_list calls;
};

/// Runs `action` in a child that is killed before its system call number `last`, or ends before.
template <typename function>
traced_run run_until_call(std::size_t last, function action) {
  const pid_t child = start_child([&] {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == -1) _exit(77);
    ::raise(SIGSTOP);
    action();
  });
  int status = wait_for(child);
  if (!WIFSTOPPED(status)) return {.is_possible = false, .was_killed = false, .calls = {}};
  ::ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
  traced_run result;
  for (std::size_t calls = 0;;) {
    ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    status = wait_for(child);
    if (!WIFSTOPPED(status)) break;
    __ptrace_syscall_info info{};
    if (::ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof info, &info) <= 0) result.is_possible = false;
    if (info.op == PTRACE_SYSCALL_INFO_ENTRY && calls++ == last) ::kill(child, SIGKILL);
    const std::string call = info.op == PTRACE_SYSCALL_INFO_ENTRY ? lasting_call(child, info) : "";
    if (!call.empty() && (result.calls.empty() || result.calls.back() != call)) result.calls.push_back(call);
  }
  result.was_killed = WIFSIGNALED(status);
  if (!result.was_killed && status != 0) result.is_possible = false;
  return result;
}

TEST_CASE("checkpoint: a writer that is killed before each of its system calls") {
  const temporary_directory directory;
  const fs::path template_files = directory.path() / "template";
  write_checkpoint(template_files, 1);
  write_checkpoint(template_files, 2);
  const fs::path work = directory.path() / "work";
  const auto write_third = [&] { write_checkpoint(work, 3); };

  fs::copy(template_files, work);
  const traced_run whole = run_until_call(std::numeric_limits<std::size_t>::max(), write_third);
  if (!whole.is_possible) {
    WARN("checkpoint: a writer that is killed before each of its system calls: skipped, no tracing here");
    return;
  }
  // What a power failure would leave, no test can see; it follows from this order.
  CHECK(whole.calls == name_list{"write", "sync file", "rename", "sync directory", "remove"});
  CHECK(files_of(work) == names_of({2, 3}));

  std::array<std::size_t, 2> found{};
  std::size_t call = 0;
  for (bool was_killed = true; was_killed; ++call) {
    fs::remove_all(work);
    fs::copy(template_files, work);
    was_killed = run_until_call(call, write_third).was_killed;
    INFO("killed before system call " << call);
    const fs::path newest = newest_without_fault(work);
    REQUIRE((newest == work / name_of(2) || newest == work / name_of(3)));
    REQUIRE(holds_its_step(newest));
    REQUIRE(holds_its_step(work / name_of(2)));
    ++found[newest == work / name_of(3) ? 1 : 0];
    write_checkpoint(work, 4);
    REQUIRE(files_of(work) == (newest == work / name_of(3) ? names_of({3, 4}) : names_of({2, 4})));
  }
  INFO(call << " system calls");
  CHECK(found[0] > 10);
  CHECK(found[1] > 3);
}

}  // namespace
