// SPDX-License-Identifier: MIT
#include "checkpoint.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "lamina/detail/checksum.hpp"

namespace resnet50_ps {

struct checkpoint_header {
  std::uint64_t magic = 0x50434e494d414c89;  // the byte 89 and "LAMINCP": no text begins so
  std::uint32_t version = 1;
  std::uint32_t reserved = 0;
  std::uint64_t step = 0;
  std::uint64_t file_bytes = 0;
  std::uint64_t index_bytes = 0;
  std::uint64_t checksum = 0;
};

namespace {

namespace fs = std::filesystem;
using lamina::detail::checksum;

static_assert(checksum::available,
              "checkpoints need xxhash.h, of the package libxxhash-dev on Debian and Ubuntu");
static_assert(std::endian::native == std::endian::little,
              "checkpoints are little-endian; this machine is not");

constexpr std::string_view name_prefix = "checkpoint-";
constexpr std::string_view name_suffix = ".lamina";
constexpr std::string_view temporary_mark = ".lamina.tmp-";
constexpr std::size_t step_digits = 12;
// What is summed is still in the cache when it is written.
constexpr std::size_t piece_bytes = std::size_t{1} << 20;

struct index_entry {
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
  std::uint64_t name_bytes = 0;
};
static_assert(sizeof(checkpoint_header) == 48 && sizeof(index_entry) == 24);

// ---- System calls ----

[[noreturn]] void fail(const std::string& doing, const fs::path& path, int error) {
  const std::string reason = std::system_category().message(error);
  throw std::runtime_error("cannot " + doing + " " + path.string() + ": " +
                           (error == ENOSPC ? "the disk is full (" + reason + ")" : reason));
}

template <class Call>
auto retried(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

file_descriptor try_open(const fs::path& path, int flags) {
  return file_descriptor(retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); }));
}

file_descriptor open_to_read(const fs::path& path, int flags) {
  file_descriptor file = try_open(path, O_RDONLY | flags);
  if (!file.is_open()) fail("open", path, errno);
  return file;
}

struct stat status_of(const file_descriptor& file, const fs::path& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) == -1) fail("examine", path, errno);
  return status;
}

void sync_directory(const fs::path& directory) {
  const file_descriptor opened = open_to_read(directory, O_DIRECTORY);
  // EINVAL: some network file systems have no such call for directories.
  if (retried([&] { return ::fsync(opened.get()); }) == -1 && errno != EINVAL) fail("sync", directory, errno);
}

// A directory that was made lasts only when the one it lies in has been synced.
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

std::vector<fs::path> files_in(const fs::path& directory) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error); !error && entry != fs::directory_iterator();) {
    files.push_back(entry->path());
    entry.increment(error);
  }
  if (error) fail("list", directory, error.value());
  return files;
}

// ---- Names ----

std::string checkpoint_name(std::uint64_t step) {
  const std::string digits = std::to_string(step);
  const std::string zeros(step_digits - std::min(step_digits, digits.size()), '0');
  return std::string(name_prefix) + zeros + digits + std::string(name_suffix);
}

// Only names that checkpoint_name returns: others are files of the user, and never removed.
std::optional<std::uint64_t> step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with(name_prefix)) return std::nullopt;
  std::uint64_t step = 0;
  std::from_chars(name.data() + name_prefix.size(), name.data() + name.size(), step);
  return name == checkpoint_name(step) ? std::optional(step) : std::nullopt;
}

bool is_temporary(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with(name_prefix) && name.find(temporary_mark) != std::string::npos;
}

struct checkpoint_file {
  std::uint64_t step;
  fs::path path;
};

// The newest first.
std::vector<checkpoint_file> checkpoints_in(const fs::path& directory) {
  std::vector<checkpoint_file> found;
  for (const fs::path& path : files_in(directory)) {
    if (const auto step = step_of(path)) found.push_back({*step, path});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.step > b.step; });
  return found;
}

// ---- Removing ----

// A lock ends with the process that holds it, however that ends, and unlike a process id it is never that of another.
// Best effort: whatever cannot be removed only takes space.
void remove_stale_files(const fs::path& directory) {
  for (const fs::path& path : files_in(directory)) {
    if (!is_temporary(path)) continue;
    const file_descriptor file = try_open(path, O_WRONLY | O_NONBLOCK | O_NOFOLLOW);
    if (file.is_open() && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
  }
}

// Why the file is not a good checkpoint; empty if it is.
std::string fault_of(const fs::path& path) {
  try {
    const checkpoint_reader reader(path);
    return {};
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

// Of the checkpoints besides the one just written the newest good one stays, and those of a higher step, which are
// damaged or of a program that reads more than this one.
void remove_old_checkpoints(const fs::path& directory, std::uint64_t written) {
  std::vector<checkpoint_file> others = checkpoints_in(directory);
  std::erase_if(others, [&](const checkpoint_file& each) { return each.step == written; });
  if (others.size() < 2) return;
  const auto is_good = [](const checkpoint_file& each) { return fault_of(each.path).empty(); };
  auto old = std::find_if(others.begin(), others.end(), is_good);
  if (old == others.end()) return;
  while (++old != others.end()) {
    // ENOENT: another writer was quicker.
    if (::unlink(old->path.c_str()) == -1 && errno != ENOENT) fail("remove the old", old->path, errno);
  }
}

// ---- Bytes ----

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

void append(std::vector<std::byte>& bytes, std::span<const std::byte> more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

// The header's own checksum field counts as zero.
std::uint64_t index_checksum(checkpoint_header header, std::span<const std::byte> index) {
  header.checksum = 0;
  checksum sum;
  sum.add(index);
  sum.add(bytes_of(header));
  return sum.value();
}

std::string in_quotes(const std::string& name) {
  return "'" + name + "'";
}

}  // namespace

file_descriptor::~file_descriptor() {
  if (is_open()) ::close(number_);
}

// ---- Writer ----

/// Holds the lock that tells other writers that this one lives. Unlinks the file unless it has been renamed.
class checkpoint_writer::temporary_file {
 public:
  static std::unique_ptr<temporary_file> create(const fs::path& directory, std::uint64_t step);

  temporary_file(fs::path path, file_descriptor file) : path_(std::move(path)), file_(std::move(file)) {}
  ~temporary_file() {
    if (!renamed_) ::unlink(path_.c_str());
  }
  temporary_file(const temporary_file&) = delete;
  temporary_file& operator=(const temporary_file&) = delete;

  /// Returns the checksum of `bytes`.
  std::uint64_t append(std::span<const std::byte> bytes);

  /// Over what the file begins with.
  void write_header(const checkpoint_header& header) { write(bytes_of(header), 0); }

  void sync_and_rename(const fs::path& name);

  std::uint64_t bytes() const { return end_; }

 private:
  bool lock();
  void write(std::span<const std::byte> bytes, std::uint64_t offset);

  fs::path path_;
  file_descriptor file_;
  std::uint64_t end_ = 0;
  bool renamed_ = false;
};

std::unique_ptr<checkpoint_writer::temporary_file> checkpoint_writer::temporary_file::create(
    const fs::path& directory, std::uint64_t step) {
  static std::atomic<std::uint64_t> files = 0;
  const std::string prefix = checkpoint_name(step) + ".tmp-" + std::to_string(::getpid()) + "-";
  while (true) {
    fs::path path = directory / (prefix + std::to_string(files++));
    file_descriptor opened = try_open(path, O_WRONLY | O_CREAT | O_EXCL);
    // EEXIST: of a living process with the same id, on another machine or in another container.
    if (!opened.is_open() && errno == EEXIST) continue;
    if (!opened.is_open()) fail("create", path, errno);
    auto file = std::make_unique<temporary_file>(std::move(path), std::move(opened));
    if (file->lock()) return file;
  }
}

// False if another writer removed the file as stale before it was locked.
bool checkpoint_writer::temporary_file::lock() {
  const bool locked = retried([&] { return ::flock(file_.get(), LOCK_EX); }) == 0;
  // Where the file system has no locks other writers get none either, and remove nothing.
  if (!locked && errno != ENOLCK && errno != ENOSYS && errno != EOPNOTSUPP) fail("lock", path_, errno);
  return status_of(file_, path_).st_nlink > 0;
}

std::uint64_t checkpoint_writer::temporary_file::append(std::span<const std::byte> bytes) {
  checksum sum;
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), piece_bytes));
    sum.add(piece);
    write(piece, end_);
    end_ += piece.size();
    bytes = bytes.subspan(piece.size());
  }
  return sum.value();
}

void checkpoint_writer::temporary_file::write(std::span<const std::byte> bytes, std::uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t written = retried(
        [&] { return ::pwrite(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (written == -1) fail("write", path_, errno);
    // POSIX lets a write of nothing succeed; trying again for ever would hide it.
    if (written == 0) fail("write", path_, EIO);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

// In this order: a name that lasts stands for contents that last.
void checkpoint_writer::temporary_file::sync_and_rename(const fs::path& name) {
  if (retried([&] { return ::fsync(file_.get()); }) == -1) fail("sync", path_, errno);
  if (std::rename(path_.c_str(), name.c_str()) == -1) fail("rename", path_, errno);
  renamed_ = true;
}

checkpoint_writer::checkpoint_writer(const fs::path& directory, std::uint64_t step)
    : directory_(fs::absolute(directory)), step_(step) {
  make_directories(directory_);
  remove_stale_files(directory_);
  file_ = temporary_file::create(directory_, step);
  // The place of the header, which comes last: until then the file is no checkpoint.
  file_->append(std::vector<std::byte>(sizeof(checkpoint_header)));
}

checkpoint_writer::~checkpoint_writer() = default;

// Whoever takes it puts it back on success; an exception removes it.
std::unique_ptr<checkpoint_writer::temporary_file> checkpoint_writer::take_file() {
  if (!file_) throw std::logic_error("the checkpoint is written already, or could not be written");
  return std::move(file_);
}

void checkpoint_writer::add(std::string name, std::span<const std::byte> bytes) {
  if (names_.contains(name)) throw std::invalid_argument("a checkpoint has one section " + in_quotes(name));
  auto file = take_file();
  const index_entry entry{bytes.size(), file->append(bytes), name.size()};
  append(index_, bytes_of(entry));
  append(index_, std::as_bytes(std::span(name)));
  names_.insert(std::move(name));
  file_ = std::move(file);
}

void checkpoint_writer::commit() {
  const auto file = take_file();
  file->append(index_);
  checkpoint_header header;
  header.step = step_;
  header.file_bytes = file->bytes();
  header.index_bytes = index_.size();
  header.checksum = index_checksum(header, index_);
  file->write_header(header);
  file->sync_and_rename(directory_ / checkpoint_name(step_));
  sync_directory(directory_);
  remove_old_checkpoints(directory_, step_);
}

// ---- Reader ----

// Non-blocking: a pipe of that name is refused, not waited for.
checkpoint_reader::checkpoint_reader(fs::path file)
    : path_(std::move(file)), file_(open_to_read(path_, O_NONBLOCK)) {
  const checkpoint_header header = read_header();
  step_ = header.step;
  read_index(header);
  verify_sections();
}

checkpoint_header checkpoint_reader::read_header() const {
  const struct stat status = status_of(file_, path_);
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
  if (read.version != expected.version || read.file_bytes != file_bytes || !has_index) {
    refuse("is damaged: its header is wrong");
  }
  return read;
}

// All lengths are held against those of the file before anything is done with them.
void checkpoint_reader::read_index(const checkpoint_header& header) {
  std::vector<std::byte> bytes(header.index_bytes);
  read_at(header.file_bytes - header.index_bytes, bytes);
  if (header.checksum != index_checksum(header, bytes))
    refuse("is damaged: the checksum of its index is wrong");
  std::uint64_t offset = sizeof header;
  std::uint64_t left = header.file_bytes - header.index_bytes - offset;
  for (std::span<const std::byte> rest = bytes; !rest.empty();) {
    index_entry entry;
    if (rest.size() < sizeof entry) refuse("is damaged: its index is wrong");
    std::memcpy(&entry, rest.data(), sizeof entry);
    rest = rest.subspan(sizeof entry);
    if (entry.name_bytes > rest.size() || entry.bytes > left) refuse("is damaged: its index is wrong");
    std::string name(reinterpret_cast<const char*>(rest.data()), entry.name_bytes);
    rest = rest.subspan(entry.name_bytes);
    const section added{sections_.size(), offset, entry.bytes, entry.checksum};
    if (!sections_.emplace(std::move(name), added).second) refuse("is damaged: its index is wrong");
    offset += entry.bytes;
    left -= entry.bytes;
  }
  if (left != 0) refuse("is damaged: its index is wrong");
}

void checkpoint_reader::verify_sections() const {
  std::vector<std::byte> buffer(piece_bytes);
  for (const auto& [name, each] : sections_) {
    checksum sum;
    for (std::uint64_t done = 0; done < each.bytes;) {
      const auto piece = std::span(buffer).first(std::min<std::uint64_t>(each.bytes - done, piece_bytes));
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
  const section& found = find(name);
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
  while (!bytes.empty()) {
    const ssize_t count =
        retried([&] { return ::pread(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (count == -1) fail("read", path_, errno);
    if (count == 0) refuse("is truncated: it was cut while it was read");
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
}

const checkpoint_reader::section& checkpoint_reader::find(const std::string& name) const {
  const auto found = sections_.find(name);
  if (found == sections_.end()) refuse("has no section " + in_quotes(name));
  return found->second;
}

void checkpoint_reader::refuse(const std::string& why) const {
  throw std::runtime_error(path_.string() + " " + why);
}

std::optional<fs::path> newest_checkpoint(const fs::path& directory,
                                          const std::function<void(const std::string&)>& skipped) {
  std::error_code ignored;
  if (fs::status(directory, ignored).type() == fs::file_type::not_found) return std::nullopt;
  for (const checkpoint_file& each : checkpoints_in(directory)) {
    const std::string fault = fault_of(each.path);
    if (fault.empty()) return each.path;
    if (skipped) skipped(fault);
  }
  return std::nullopt;
}

}  // namespace resnet50_ps
