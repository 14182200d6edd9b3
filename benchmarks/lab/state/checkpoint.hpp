// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// Checkpoint files: named sections of bytes, with a checksum. A kill, a power failure or a full disk at any moment
/// leaves the checkpoints written before as they were. Failed system calls throw std::runtime_error with the file and
/// the system's reason.
namespace lab {

/// How the file begins, little-endian. Then comes each section: the length of its name and its own, 8 bytes each, its name,
/// its bytes.
struct checkpoint_header {
  std::uint64_t magic = 0x50434e494d414c89;  ///< the byte 89 and "LAMINCP": no text begins so
  std::uint32_t version = 2;
  std::uint32_t sections = 0;
  std::uint64_t step = 0;
  std::uint64_t file_bytes = 0;
  std::uint64_t checksum = 0;  ///< XXH3 of all that follows, and then of the header, in which this field is 0
};
static_assert(sizeof(checkpoint_header) == 40);

struct checkpoint_section {
  std::string name;
  std::span<const std::byte> bytes;
};

/// Writes DIRECTORY/checkpoint-STEP.lamina, over one of the same step. The directory, and those it lies in, are made if missing.
/// When it returns the checkpoint is on the disk; if it throws nothing of it is there. Then removes what is older than the
/// newest good checkpoint besides this one, so that two remain; a failure to do so is thrown as well. Throws
/// std::invalid_argument for two sections of a name, and std::runtime_error while another process writes one into the directory.
/// Needs room for three checkpoints.
void write_checkpoint(const std::filesystem::path& directory, std::uint64_t step,
                      std::span<const checkpoint_section> sections);

/// One checkpoint, which has been read into memory and found good.
class checkpoint {
 public:
  /// Throws std::runtime_error that says whether the file is no checkpoint, of another format version, truncated or damaged.
  explicit checkpoint(std::filesystem::path file);

  const std::filesystem::path& file() const noexcept { return file_; }
  std::uint64_t step() const noexcept { return step_; }
  const std::map<std::string, std::span<const std::byte>>& sections() const noexcept { return sections_; }

  /// Throws std::runtime_error for a section that it has not.
  std::span<const std::byte> operator[](const std::string& name) const;
  /// Throws std::runtime_error also for a section of another length.
  void read_into(const std::string& name, std::span<std::byte> bytes) const;

  checkpoint(checkpoint&&) = default;
  checkpoint& operator=(checkpoint&&) = default;
  checkpoint(const checkpoint&) = delete;  // sections point into the bytes
  checkpoint& operator=(const checkpoint&) = delete;

 private:
  std::filesystem::path file_;
  std::uint64_t step_ = 0;
  std::vector<std::byte> bytes_;
  std::map<std::string, std::span<const std::byte>> sections_;
};

/// The checkpoint of the highest step that is good, if there is any; for each of a higher step `skipped` is told why it is not.
/// A missing directory holds none.
std::optional<checkpoint> newest_checkpoint(const std::filesystem::path& directory,
                                            const std::function<void(const std::string&)>& skipped = nullptr);

}  // namespace lab
