// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "messages/transfer.hpp"

namespace lab {

/// What a step's transfers over a way that loses some of them took.
struct transfer_metrics {
  transfer_cost up;    ///< of the gradients
  transfer_cost down;  ///< of the parameters that this step began with
};

/// Of a step whose gradients are summed beside the computation, as worker 0 saw it.
struct overlap_metrics {
  double exposed_seconds = 0;     ///< in which the computation waited for collectives
  double hidden_seconds = 0;      ///< of collectives beside the computation: the rest of what they took
  std::uint64_t collectives = 0;  ///< that were made
  /// By the plan's costs; none where some layers are held back, and where sums go on in the next forward pass.
  std::optional<double> predicted_exposed_seconds = {};
};

/// One step as the server saw it: a synchronous one, or W frames of the asynchronous server. Sent fractions are bytes of
/// frames over bytes of all parameters in float, as means over the workers.
struct step_metrics {
  std::uint64_t step = 0;
  double loss = 0;               ///< mean over the workers' batches
  double accuracy = 0;           ///< on the training batches, before the update
  double sent_up = 0;            ///< of the gradients
  double sent_down = 0;          ///< of the parameters that this step began with
  std::uint64_t bytes_up = 0;    ///< of all frames of gradients
  std::uint64_t bytes_down = 0;  ///< of all frames of parameters
  double threshold = 0;          ///< mean over the workers
  double staleness =
      0;  ///< frames applied between a worker's pull and its push, mean; 0 for the synchronous server
  float learning_rate = 0;
  std::vector<std::size_t> arrived;  ///< layers that at least one worker sent
  double worker_seconds = 0;         ///< compute of the slowest worker
  double server_seconds = 0;         ///< decode, mean, update, encode
  double communication_seconds = 0;  ///< the rest of the step
  double node_seconds = 0;           ///< the part of it that is within the slowest node
  double total_seconds = 0;
  std::optional<transfer_metrics> transfers;  ///< none: nothing can be lost
  std::optional<overlap_metrics> overlap = {};
};

/// The workers' shares of one evaluation.
struct evaluation {
  std::uint64_t images = 0;
  std::uint64_t top1 = 0;  ///< images whose class came first
  std::uint64_t top5 = 0;  ///< among the first five

  double top1_accuracy() const { return static_cast<double>(top1) / static_cast<double>(images); }
  double top5_accuracy() const { return static_cast<double>(top5) / static_cast<double>(images); }
};

}  // namespace lab
