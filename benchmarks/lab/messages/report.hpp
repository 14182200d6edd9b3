// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lab {

/// What a worker tells beside its gradients.
struct step_report {
  double loss = 0;  ///< mean over its batch
  double compute_seconds =
      0;  ///< from the parameters' arrival to the frame that is ready to send, without evaluations
  double node_seconds = 0;         ///< sums within its node, and handing parameters on
  double threshold = 0;            ///< λ of this step
  std::uint64_t correct = 0;       ///< images whose class was predicted
  std::uint64_t images = 0;        ///< images in its batch
  std::uint64_t replica_hash = 0;  ///< of the parameters that this step began with; 0 where it was not taken

  // Of an evaluation before this step; 0 test images where there was none.
  std::uint64_t test_images = 0;
  std::uint64_t test_top1 = 0;  ///< images whose class came first
  std::uint64_t test_top5 = 0;  ///< among the first five
  double evaluation_seconds = 0;
};

/// As bytes of a message, eight a field, and back. Throws link_error for bytes of another length.
std::vector<std::byte> encode_report(const step_report& report);
step_report decode_report(std::span<const std::byte> bytes);
inline constexpr std::size_t report_bytes = std::size_t{11} * 8;

/// One report for two workers, but for the hash of the replica, which is a's.
step_report merged(const step_report& a, const step_report& b);

}  // namespace lab
