// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "lamina/detail/abi.hpp"

/// Launches that came out of order where the host could not see it, since they were parts of graphs. A kernel that finds one
/// changes nothing that was not sent, and leaves a bit for the next last_step().
namespace lamina::inline LAMINA_ABI::cuda::detail {

enum class misuse : std::uint32_t {
  select_without_gradients = 1U << 0U,
  other_selection = 1U << 1U,
  encode_without_selection = 1U << 2U,
  commit_without_frame = 1U << 3U,
  commit_twice = 1U << 4U,
  restore_without_frame = 1U << 5U,
};

inline constexpr const char* other_selection_sentence =
    "select: this step was decided before in another way; own values, agreed ones, and agreed ones with "
    "these or "
    "those layers held do not mix within a step";

/// A sentence for each bit.
inline std::string described(std::uint32_t misuses) {
  static constexpr std::pair<misuse, const char*> sentences[] = {
      {misuse::select_without_gradients,
       "select: was launched without gradients since the last commit, and did nothing"},
      {misuse::other_selection, other_selection_sentence},
      {misuse::encode_without_selection,
       "encode: was launched without a selection since the last gradients or commit, and wrote no frame"},
      {misuse::commit_without_frame,
       "commit: was launched without a frame of the residual as it is; it did nothing, or it would have "
       "discarded gradients "
       "that came later"},
      {misuse::commit_twice, "commit: was launched twice for one frame; the second did nothing"},
      {misuse::restore_without_frame,
       "restore: was launched without a frame since the last gradients, and did nothing"},
  };
  std::string all = "launched out of order:";
  for (const auto& [bit, sentence] : sentences) {
    if ((misuses & static_cast<std::uint32_t>(bit)) == 0) continue;
    if (all.back() != ':') all += ';';
    all += ' ';
    all += sentence;
  }
  return all;
}

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
