// SPDX-License-Identifier: MIT
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace resnet50_ps {

/// Owns a descriptor of an open file, or none.
class file_descriptor {
 public:
  explicit file_descriptor(int number) noexcept : number_(number) {}
  file_descriptor(file_descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  file_descriptor& operator=(file_descriptor&&) = delete;
  ~file_descriptor();

  bool is_open() const noexcept { return number_ >= 0; }
  int get() const noexcept { return number_; }

 private:
  int number_;
};

}  // namespace resnet50_ps

/// The system calls that checkpoints need. Those that fail throw as fail() does, and those that a signal interrupts are
/// made again. `path` is that of `file`, for the message.
namespace resnet50_ps::files {

/// Throws std::runtime_error with the file and the system's reason.
[[noreturn]] void fail(const std::string& doing, const std::filesystem::path& path, int error);

/// None if it fails; errno says why.
file_descriptor try_open(const std::filesystem::path& path, int flags);
file_descriptor open_to_read(const std::filesystem::path& path, int flags);
/// A new file. None if there is one of this name.
file_descriptor create(const std::filesystem::path& path);

struct stat status_of(const file_descriptor& file, const std::filesystem::path& path);

/// Returns how many bytes it read: fewer than asked for only at the end of the file.
std::size_t read_at(const file_descriptor& file, const std::filesystem::path& path, std::uint64_t offset,
                    std::span<std::byte> bytes);
void write_at(const file_descriptor& file, const std::filesystem::path& path, std::uint64_t offset,
              std::span<const std::byte> bytes);

/// What was written lasts, also after a power failure; for a directory the names in it.
void sync(const file_descriptor& file, const std::filesystem::path& path);
void sync_directory(const std::filesystem::path& directory);

/// A lock ends with the process that holds it, however that ends, and unlike a process id it is never that of another.
/// Where the file system has no locks nobody gets one, and lock() does nothing.
void lock(const file_descriptor& file, const std::filesystem::path& path);
bool try_lock(const file_descriptor& file);

void rename(const std::filesystem::path& from, const std::filesystem::path& to);
/// Whether the file is gone, also where another process was quicker; if not, errno says why.
bool try_remove(const std::filesystem::path& path) noexcept;

/// Makes those it lies in as well. They last.
void make_directories(const std::filesystem::path& directory);
std::vector<std::filesystem::path> in_directory(const std::filesystem::path& directory);

}  // namespace resnet50_ps::files
