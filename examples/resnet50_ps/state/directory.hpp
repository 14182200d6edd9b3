// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

/// The names of checkpoints in their directory, and which of them are removed when.
namespace resnet50_ps {

std::string checkpoint_name(std::uint64_t step);

/// Of a file that is not whole yet, and no checkpoint. `number` tells those of one process apart.
std::string temporary_name(std::uint64_t step, std::uint64_t number);

/// Removes temporary files whose writers hold no lock on them: they were killed.
void remove_stale_files(const std::filesystem::path& directory);

/// Of the checkpoints besides the one just written the newest good one stays, and those of a higher step, which are
/// damaged or of a program that reads more than this one.
void remove_old_checkpoints(const std::filesystem::path& directory, std::uint64_t written);

}  // namespace resnet50_ps
