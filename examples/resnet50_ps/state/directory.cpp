// SPDX-License-Identifier: MIT
#include "state/directory.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

#include "state/checkpoint.hpp"
#include "state/files.hpp"

namespace resnet50_ps {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view name_prefix = "checkpoint-";
constexpr std::string_view name_suffix = ".lamina";
constexpr std::string_view temporary_mark = ".lamina.tmp-";
constexpr std::size_t step_digits = 12;

std::string stem_of(std::uint64_t step) {
  const std::string digits = std::to_string(step);
  const std::string zeros(step_digits - std::min(step_digits, digits.size()), '0');
  return std::string(name_prefix) + zeros + digits;
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
  for (const fs::path& path : files::in_directory(directory)) {
    if (const auto step = step_of(path)) found.push_back({*step, path});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.step > b.step; });
  return found;
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

}  // namespace

std::string checkpoint_name(std::uint64_t step) {
  return stem_of(step) + std::string(name_suffix);
}

std::string temporary_name(std::uint64_t step, std::uint64_t number) {
  return stem_of(step) + std::string(temporary_mark) + std::to_string(::getpid()) + "-" +
         std::to_string(number);
}

void remove_stale_files(const fs::path& directory) {
  for (const fs::path& path : files::in_directory(directory)) {
    if (!is_temporary(path)) continue;
    const file_descriptor file = files::try_open(path, O_WRONLY | O_NONBLOCK | O_NOFOLLOW);
    // What cannot be removed only takes space.
    if (file.is_open() && files::try_lock(file)) files::try_remove(path);
  }
}

void remove_old_checkpoints(const fs::path& directory, std::uint64_t written) {
  std::vector<checkpoint_file> others = checkpoints_in(directory);
  std::erase_if(others, [&](const checkpoint_file& each) { return each.step == written; });
  if (others.size() < 2) return;
  const auto is_good = [](const checkpoint_file& each) { return fault_of(each.path).empty(); };
  auto old = std::find_if(others.begin(), others.end(), is_good);
  if (old == others.end()) return;
  while (++old != others.end()) {
    if (!files::try_remove(old->path)) files::fail("remove the old", old->path, errno);
  }
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
