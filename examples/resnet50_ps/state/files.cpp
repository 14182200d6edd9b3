// SPDX-License-Identifier: MIT
#include "state/files.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <stdexcept>
#include <system_error>

namespace resnet50_ps {

file_descriptor::~file_descriptor() {
  if (is_open()) ::close(number_);
}

}  // namespace resnet50_ps

namespace resnet50_ps::files {
namespace {

namespace fs = std::filesystem;

template <class Call>
auto retried(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

}  // namespace

void fail(const std::string& doing, const fs::path& path, int error) {
  const std::string reason = std::system_category().message(error);
  throw std::runtime_error("cannot " + doing + " " + path.string() + ": " +
                           (error == ENOSPC ? "the disk is full (" + reason + ")" : reason));
}

file_descriptor try_open(const fs::path& path, int flags) {
  return file_descriptor(retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); }));
}

file_descriptor open_to_read(const fs::path& path, int flags) {
  file_descriptor file = try_open(path, O_RDONLY | flags);
  if (!file.is_open()) fail("open", path, errno);
  return file;
}

file_descriptor create(const fs::path& path) {
  file_descriptor file = try_open(path, O_WRONLY | O_CREAT | O_EXCL);
  if (!file.is_open() && errno != EEXIST) fail("create", path, errno);
  return file;
}

struct stat status_of(const file_descriptor& file, const fs::path& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) == -1) fail("examine", path, errno);
  return status;
}

std::size_t read_at(const file_descriptor& file, const fs::path& path, std::uint64_t offset,
                    std::span<std::byte> bytes) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const auto rest = bytes.subspan(done);
    const ssize_t count = retried(
        [&] { return ::pread(file.get(), rest.data(), rest.size(), static_cast<off_t>(offset + done)); });
    if (count == -1) fail("read", path, errno);
    if (count == 0) break;
    done += static_cast<std::size_t>(count);
  }
  return done;
}

void write_at(const file_descriptor& file, const fs::path& path, std::uint64_t offset,
              std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count =
        retried([&] { return ::pwrite(file.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (count == -1) fail("write", path, errno);
    // POSIX lets a write of nothing succeed; trying again for ever would hide it.
    if (count == 0) fail("write", path, EIO);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
}

void sync(const file_descriptor& file, const fs::path& path) {
  if (retried([&] { return ::fsync(file.get()); }) == -1) fail("sync", path, errno);
}

void sync_directory(const fs::path& directory) {
  const file_descriptor opened = open_to_read(directory, O_DIRECTORY);
  // EINVAL: some network file systems have no such call for directories.
  if (retried([&] { return ::fsync(opened.get()); }) == -1 && errno != EINVAL) fail("sync", directory, errno);
}

void lock(const file_descriptor& file, const fs::path& path) {
  const bool locked = retried([&] { return ::flock(file.get(), LOCK_EX); }) == 0;
  if (!locked && errno != ENOLCK && errno != ENOSYS && errno != EOPNOTSUPP) fail("lock", path, errno);
}

bool try_lock(const file_descriptor& file) {
  return ::flock(file.get(), LOCK_EX | LOCK_NB) == 0;
}

void rename(const fs::path& from, const fs::path& to) {
  if (std::rename(from.c_str(), to.c_str()) == -1) fail("rename", from, errno);
}

bool try_remove(const fs::path& path) noexcept {
  return ::unlink(path.c_str()) == 0 || errno == ENOENT;
}

void make_directories(const fs::path& directory) {
  std::error_code ignored;
  if (fs::is_directory(directory, ignored)) return;
  const fs::path parent =
      directory.has_filename() ? directory.parent_path() : directory.parent_path().parent_path();
  if (parent != directory) make_directories(parent);
  if (::mkdir(directory.c_str(), 0777) == -1) {
    const int error = errno;
    if (error == EEXIST && fs::is_directory(directory, ignored)) return;
    fail("make the directory", directory, error == EEXIST ? ENOTDIR : error);
  }
  // A directory that was made lasts only when the one it lies in has been synced.
  sync_directory(parent);
}

std::vector<fs::path> in_directory(const fs::path& directory) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error); !error && entry != fs::directory_iterator();) {
    found.push_back(entry->path());
    entry.increment(error);
  }
  if (error) fail("list", directory, error.value());
  return found;
}

}  // namespace resnet50_ps::files
