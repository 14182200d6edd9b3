// SPDX-License-Identifier: MIT
#include "state/checkpoint.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "lamina/detail/checksum.hpp"

namespace lab {
namespace {

namespace fs = std::filesystem;
using lamina::detail::checksum;

static_assert(std::endian::native == std::endian::little,
              "checkpoints are little-endian; this machine is not");

// Summed and written in pieces that are still in the cache.
constexpr std::size_t piece_bytes = std::size_t{1} << 20;
constexpr std::string_view prefix = "checkpoint-";
constexpr std::string_view suffix = ".lamina";
constexpr std::string_view unfinished = "checkpoint.tmp";

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

[[noreturn]] void fail(const std::string& doing, const fs::path& path, int error) {
  const std::string reason = std::system_category().message(error);
  throw std::runtime_error("cannot " + doing + " " + path.string() + ": " +
                           (error == ENOSPC ? "the disk is full (" + reason + ")" : reason));
}

// Those that a signal interrupts are made again.
template <class Call>
auto checked(const std::string& doing, const fs::path& path, Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  if (result == -1) fail(doing, path, errno);
  return result;
}

class open_file {
 public:
  open_file(fs::path path, int flags, const char* doing = "open")
      : path_(std::move(path)),
        number_(checked(doing, path_, [&] { return ::open(path_.c_str(), flags | O_CLOEXEC, 0666); })) {}
  ~open_file() { ::close(number_); }
  open_file(const open_file&) = delete;
  open_file& operator=(const open_file&) = delete;

  int number() const { return number_; }
  struct stat status() const {
    struct stat status {};
    checked("examine", path_, [&] { return ::fstat(number_, &status); });
    return status;
  }
  // Fewer than asked for only at the end of the file.
  std::size_t read_at(std::uint64_t offset, std::span<std::byte> bytes) const {
    std::size_t done = 0;
    for (ssize_t count = 1; count > 0 && done < bytes.size(); done += static_cast<std::size_t>(count)) {
      const auto rest = bytes.subspan(done);
      count = checked("read", path_, [&] {
        return ::pread(number_, rest.data(), rest.size(), static_cast<off_t>(offset + done));
      });
    }
    return done;
  }
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t count = checked("write", path_, [&] {
        return ::pwrite(number_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
      });
      // POSIX lets a write of nothing succeed; trying again for ever would hide it.
      if (count == 0) fail("write", path_, EIO);
      bytes = bytes.subspan(static_cast<std::size_t>(count));
      offset += static_cast<std::uint64_t>(count);
    }
  }
  void sync() const {
    checked("sync", path_, [&] {
      const int result = ::fsync(number_);
      return result == -1 && errno == EINVAL
                 ? 0
                 : result;  // some network file systems do not know it of directories
    });
  }

 private:
  fs::path path_;
  int number_;
};

void sync_directory(const fs::path& directory) {
  open_file(directory, O_RDONLY | O_DIRECTORY).sync();
}

// Makes those it lies in as well. A directory that was made lasts only when the one it lies in has been synced.
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
  sync_directory(parent);
}

std::string name_of(std::uint64_t step) {
  const std::string digits = std::to_string(step);
  constexpr std::size_t width = 12;
  return std::string(prefix) + std::string(width - std::min(width, digits.size()), '0') + digits +
         std::string(suffix);
}

// By their steps, the newest first. Only names that name_of() gives: others are files of the user, and never removed.
std::map<std::uint64_t, fs::path, std::greater<>> checkpoints_in(const fs::path& directory) {
  std::map<std::uint64_t, fs::path, std::greater<>> found;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error); !error && entry != fs::directory_iterator();) {
    const std::string name = entry->path().filename().string();
    std::uint64_t step = 0;
    if (name.starts_with(prefix))
      std::from_chars(name.data() + prefix.size(), name.data() + name.size(), step);
    if (name == name_of(step)) found.emplace(step, entry->path());
    entry.increment(error);
  }
  if (error) fail("list", directory, error.value());
  return found;
}

[[noreturn]] void refuse(const fs::path& file, const std::string& why) {
  throw std::runtime_error(file.string() + " " + why);
}

// Reads a file from end to end and gives `take` what follows the header, piece by piece; throws unless it is whole.
template <class Take>
checkpoint_header read_whole(const fs::path& path, Take take) {
  const open_file file(path, O_RDONLY | O_NONBLOCK);  // a pipe of that name is refused, not waited for
  const struct stat status = file.status();
  if (!S_ISREG(status.st_mode)) refuse(path, "is not a checkpoint");
  const checkpoint_header expected;
  checkpoint_header header;
  const std::size_t available = file.read_at(0, std::as_writable_bytes(std::span(&header, 1)));
  if (std::memcmp(&header, &expected, std::min(available, sizeof header.magic)) != 0)
    refuse(path, "is not a checkpoint");
  const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
  if (available < sizeof header) refuse(path, "is truncated: it has no whole header");
  if (header.version != expected.version) {
    refuse(path, "has format version " + std::to_string(header.version) + ", and this program reads " +
                     std::to_string(expected.version));
  }
  if (header.file_bytes > file_bytes) {
    refuse(path, "is truncated: it has " + std::to_string(file_bytes) + " of " +
                     std::to_string(header.file_bytes) + " bytes");
  }
  if (header.file_bytes != file_bytes) refuse(path, "is damaged: it has another length than it says");
  checksum sum;
  std::vector<std::byte> buffer(std::min<std::uint64_t>(piece_bytes, file_bytes));
  for (std::uint64_t done = sizeof header; done < file_bytes;) {
    const auto piece = std::span(buffer).first(std::min<std::uint64_t>(file_bytes - done, buffer.size()));
    if (file.read_at(done, piece) < piece.size()) refuse(path, "is truncated: it was cut while it was read");
    sum.add(piece);
    take(piece);
    done += piece.size();
  }
  checkpoint_header summed = header;
  summed.checksum = 0;
  sum.add(bytes_of(summed));
  if (sum.value() != header.checksum) refuse(path, "is damaged: its checksum is wrong");
  return header;
}

bool is_good(const fs::path& path) {
  try {
    read_whole(path, [](std::span<const std::byte>) {});
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

// Of the checkpoints besides the one just written the newest good one stays, and those of a higher step, which are damaged or
// of a program that writes another format.
void remove_old_checkpoints(const fs::path& directory, std::uint64_t written) {
  auto others = checkpoints_in(directory);
  others.erase(written);
  if (others.size() < 2) return;
  auto old = std::ranges::find_if(others, [](const auto& each) { return is_good(each.second); });
  if (old == others.end()) return;
  while (++old != others.end()) {
    if (::unlink(old->second.c_str()) == -1 && errno != ENOENT) fail("remove the old", old->second, errno);
  }
}

// A file that is no checkpoint until it is renamed. A lock on it ends with the process that holds it, however that ends: what
// a killed one has left is written over.
class unfinished_file {
 public:
  explicit unfinished_file(const fs::path& directory) : path_(directory / unfinished) {
    for (;;) {
      auto& file = file_.emplace(path_, O_WRONLY | O_CREAT | O_NOFOLLOW, "create");
      if (::flock(file.number(), LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK)
        refuse(directory, "is being written to by another run");
      struct stat named {};
      // Its last writer may have finished and renamed it meanwhile.
      if (::stat(path_.c_str(), &named) == 0 && named.st_ino == file.status().st_ino) break;
    }
    checked("write", path_, [&] { return ::ftruncate(file_->number(), 0); });
  }
  ~unfinished_file() {
    if (!is_renamed_) ::unlink(path_.c_str());
  }
  unfinished_file(const unfinished_file&) = delete;
  unfinished_file& operator=(const unfinished_file&) = delete;

  const open_file& get() const { return *file_; }
  // In this order: a name that lasts stands for contents that last.
  void finish(const fs::path& name) {
    file_->sync();
    checked("rename", path_, [&] { return std::rename(path_.c_str(), name.c_str()); });
    is_renamed_ = true;
    sync_directory(name.parent_path());
  }

 private:
  fs::path path_;
  std::optional<open_file> file_;
  bool is_renamed_ = false;
};

}  // namespace

void write_checkpoint(const fs::path& directory, std::uint64_t step,
                      std::span<const checkpoint_section> sections) {
  std::set<std::string_view> names;
  for (const checkpoint_section& each : sections) {
    if (!names.insert(each.name).second)
      throw std::invalid_argument("a checkpoint has one section '" + each.name + "'");
  }
  make_directories(directory);
  unfinished_file file(fs::absolute(directory));
  checkpoint_header header;
  header.sections = static_cast<std::uint32_t>(sections.size());
  header.step = step;
  header.file_bytes = sizeof header;
  checksum sum;
  const auto append = [&](std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto piece = bytes.first(std::min(bytes.size(), piece_bytes));
      sum.add(piece);
      file.get().write_at(header.file_bytes, piece);
      header.file_bytes += piece.size();
      bytes = bytes.subspan(piece.size());
    }
  };
  for (const checkpoint_section& each : sections) {
    append(bytes_of(static_cast<std::uint64_t>(each.name.size())));
    append(bytes_of(static_cast<std::uint64_t>(each.bytes.size())));
    append(std::as_bytes(std::span(each.name)));
    append(each.bytes);
  }
  sum.add(bytes_of(header));
  header.checksum = sum.value();
  file.get().write_at(0, bytes_of(header));
  file.finish(fs::absolute(directory) / name_of(step));
  remove_old_checkpoints(directory, step);
}

checkpoint::checkpoint(fs::path file) : file_(std::move(file)) {
  const checkpoint_header header = read_whole(file_, [&](std::span<const std::byte> piece) {
    bytes_.insert(bytes_.end(), piece.begin(), piece.end());
  });
  step_ = header.step;
  // All lengths are held against what there is before anything is done with them.
  std::span<const std::byte> rest = bytes_;
  const auto take = [&](std::uint64_t bytes) {
    if (bytes > rest.size()) refuse(file_, "is damaged: its sections do not fill it");
    const auto taken = rest.first(bytes);
    rest = rest.subspan(bytes);
    return taken;
  };
  for (std::uint32_t s = 0; s < header.sections; ++s) {
    std::uint64_t lengths[2];
    std::memcpy(lengths, take(sizeof lengths).data(), sizeof lengths);
    const auto name = take(lengths[0]);
    const bool is_new =
        sections_
            .emplace(std::string(reinterpret_cast<const char*>(name.data()), name.size()), take(lengths[1]))
            .second;
    if (!is_new) refuse(file_, "is damaged: it has two sections of a name");
  }
  if (!rest.empty()) refuse(file_, "is damaged: its sections do not fill it");
}

std::span<const std::byte> checkpoint::operator[](const std::string& name) const {
  const auto found = sections_.find(name);
  if (found == sections_.end()) refuse(file_, "has no section '" + name + "'");
  return found->second;
}

void checkpoint::read_into(const std::string& name, std::span<std::byte> bytes) const {
  const std::span<const std::byte> section = (*this)[name];
  if (section.size() != bytes.size()) {
    refuse(file_, "has " + std::to_string(section.size()) + " bytes in the section '" + name + "', not " +
                      std::to_string(bytes.size()));
  }
  std::ranges::copy(section, bytes.begin());
}

std::optional<checkpoint> newest_checkpoint(const fs::path& directory,
                                            const std::function<void(const std::string&)>& skipped) {
  std::error_code ignored;
  if (fs::status(directory, ignored).type() == fs::file_type::not_found) return std::nullopt;
  for (const auto& [step, path] : checkpoints_in(directory)) {
    try {
      return checkpoint(path);
    } catch (const std::runtime_error& fault) {
      if (skipped) skipped(fault.what());
    }
  }
  return std::nullopt;
}

}  // namespace lab
