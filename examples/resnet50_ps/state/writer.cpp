// SPDX-License-Identifier: MIT
#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "lamina/detail/checksum.hpp"
#include "state/checkpoint.hpp"
#include "state/directory.hpp"

namespace resnet50_ps {

namespace fs = std::filesystem;

/// Holds the lock that tells other writers that this one lives. Removes the file unless it has been renamed.
class checkpoint_writer::temporary_file {
 public:
  static std::unique_ptr<temporary_file> create(const fs::path& directory, std::uint64_t step);

  temporary_file(fs::path path, file_descriptor file) : path_(std::move(path)), file_(std::move(file)) {}
  ~temporary_file() {
    if (!renamed_) files::try_remove(path_);
  }
  temporary_file(const temporary_file&) = delete;
  temporary_file& operator=(const temporary_file&) = delete;

  /// Returns the checksum of `bytes`.
  std::uint64_t append(std::span<const std::byte> bytes);

  /// Over what the file begins with.
  void write_header(const checkpoint_header& header) {
    files::write_at(file_, path_, 0, std::as_bytes(std::span(&header, 1)));
  }

  void sync_and_rename(const fs::path& name);

  std::uint64_t bytes() const { return end_; }

 private:
  bool lock();

  fs::path path_;
  file_descriptor file_;
  std::uint64_t end_ = 0;
  bool renamed_ = false;
};

std::unique_ptr<checkpoint_writer::temporary_file> checkpoint_writer::temporary_file::create(
    const fs::path& directory, std::uint64_t step) {
  static std::atomic<std::uint64_t> numbers = 0;
  while (true) {
    fs::path path = directory / temporary_name(step, numbers++);
    file_descriptor opened = files::create(path);
    // One of a living process with the same id, on another machine or in another container.
    if (!opened.is_open()) continue;
    auto file = std::make_unique<temporary_file>(std::move(path), std::move(opened));
    if (file->lock()) return file;
  }
}

// False if another writer removed the file as stale before it was locked.
bool checkpoint_writer::temporary_file::lock() {
  files::lock(file_, path_);
  return files::status_of(file_, path_).st_nlink > 0;
}

std::uint64_t checkpoint_writer::temporary_file::append(std::span<const std::byte> bytes) {
  lamina::detail::checksum sum;
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), checkpoint_piece_bytes));
    sum.add(piece);
    files::write_at(file_, path_, end_, piece);
    end_ += piece.size();
    bytes = bytes.subspan(piece.size());
  }
  return sum.value();
}

// In this order: a name that lasts stands for contents that last.
void checkpoint_writer::temporary_file::sync_and_rename(const fs::path& name) {
  files::sync(file_, path_);
  files::rename(path_, name);
  renamed_ = true;
}

checkpoint_writer::checkpoint_writer(const fs::path& directory, std::uint64_t step)
    : directory_(fs::absolute(directory)), step_(step) {
  files::make_directories(directory_);
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
  if (names_.contains(name)) throw std::invalid_argument("a checkpoint has one section '" + name + "'");
  auto file = take_file();
  append_to_index(index_, name, bytes.size(), file->append(bytes));
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
  header.checksum = checksum_of(header, index_);
  file->write_header(header);
  file->sync_and_rename(directory_ / checkpoint_name(step_));
  files::sync_directory(directory_);
  remove_old_checkpoints(directory_, step_);
}

}  // namespace resnet50_ps
