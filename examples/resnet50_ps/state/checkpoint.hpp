// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "state/files.hpp"
#include "state/format.hpp"

/// Checkpoint files: named sections of bytes, with checksums. A kill, a power failure or a full disk at any moment
/// leaves the checkpoints written before as they were. Failed system calls throw std::runtime_error with the file and
/// the system's reason.
namespace resnet50_ps {

/// Values that can be saved as the bytes they are.
template <class T>
concept checkpoint_value = std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>;

/// Writes one checkpoint into a temporary file, which commit() renames to checkpoint-STEP.lamina. After a failed system
/// call, or without a commit, nothing of it is left. The directory needs room for three checkpoints.
class checkpoint_writer {
 public:
  /// Makes the directory, and those it lies in, if missing. Removes temporary files of writers that were killed; those
  /// of living ones, which hold a lock on theirs, are left alone.
  checkpoint_writer(const std::filesystem::path& directory, std::uint64_t step);
  ~checkpoint_writer();
  checkpoint_writer(const checkpoint_writer&) = delete;
  checkpoint_writer& operator=(const checkpoint_writer&) = delete;

  /// Writes the section to the file before it returns; keeps no copy. Throws std::invalid_argument if there is a
  /// section of this name, and std::logic_error after commit() or a failed call.
  void add(std::string name, std::span<const std::byte> bytes);

  template <checkpoint_value T>
  void add_value(const std::string& name, const T& value) {
    add(name, std::as_bytes(std::span(&value, 1)));
  }

  /// When it returns, the checkpoint is on the disk under its name, in the place of an earlier one of the same step.
  /// Then removes what is older than the newest good checkpoint besides this one, so that two remain; a failure to do
  /// so is thrown as well. Throws std::logic_error after commit() or a failed call.
  void commit();

 private:
  class temporary_file;

  std::unique_ptr<temporary_file> take_file();

  std::filesystem::path directory_;
  std::uint64_t step_;
  std::set<std::string, std::less<>> names_;
  std::vector<std::byte> index_;
  std::unique_ptr<temporary_file> file_;  // Null after commit() or a failed call.
};

/// One checkpoint, which has been read from end to end and found good.
class checkpoint_reader {
 public:
  /// Throws std::runtime_error that says whether the file is no checkpoint, of a newer format, truncated or damaged.
  explicit checkpoint_reader(std::filesystem::path file);

  std::uint64_t step() const noexcept { return step_; }

  /// In the order in which they were added.
  std::vector<std::string> names() const;

  bool has(const std::string& name) const { return sections_.contains(name); }

  /// Throws std::runtime_error for a missing section, and for one that is no longer what the constructor found good.
  std::vector<std::byte> read(const std::string& name) const;

  /// As read, into memory that is there already; after an exception its contents mean nothing. Throws
  /// std::runtime_error for a section of any other length.
  void read_into(const std::string& name, std::span<std::byte> bytes) const;

  /// As read_into.
  template <checkpoint_value T>
  T read_value(const std::string& name) const {
    T value;
    read_into(name, std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }

 private:
  checkpoint_header read_header() const;
  checkpoint_index read_index(const checkpoint_header& header) const;
  void verify_sections() const;
  void read_at(std::uint64_t offset, std::span<std::byte> bytes) const;
  const checkpoint_section& find(const std::string& name) const;
  [[noreturn]] void refuse(const std::string& why) const;

  std::filesystem::path path_;
  file_descriptor file_;
  std::uint64_t step_ = 0;
  checkpoint_index sections_;
};

/// The checkpoint of the highest step that a checkpoint_reader accepts, if there is any; for each of a higher step
/// `skipped` is told why it is not. Temporary files do not count. A missing directory holds none. Reads whole files.
std::optional<std::filesystem::path> newest_checkpoint(
    const std::filesystem::path& directory, const std::function<void(const std::string&)>& skipped = nullptr);

}  // namespace resnet50_ps
