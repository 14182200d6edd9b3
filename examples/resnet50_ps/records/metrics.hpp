// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstdint>
#include <lamina/layout.hpp>
#include <lamina/selection.hpp>
#include <map>
#include <optional>
#include <vector>

#include "messages/transport.hpp"
#include "records/stopwatch.hpp"

namespace resnet50_ps {

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
};

/// Puts a step's metrics together while it runs, of what comes from the workers, or from the leaders of their nodes.
class step_summary {
 public:
  explicit step_summary(const lamina::layout& model) : model_(model), arrived_(model) {}

  /// Counts the time from now on and not from the last finish().
  void begin() { since_last_ = stopwatch(); }
  /// What came with a frame of so many bytes.
  void add_report(const step_report& report, std::size_t frame_bytes, std::uint64_t staleness_frames = 0);
  void add_arrived(const lamina::selection& layers);
  /// A frame of parameters that went to so many.
  void add_published(std::size_t bytes, std::size_t receivers);
  void add_server_seconds(double seconds) { metrics_.server_seconds += seconds; }
  /// The metrics of the frames since the last call; the time is counted from then, too.
  step_metrics finish(std::uint64_t step, float learning_rate);

 private:
  double share_of_model(std::size_t bytes) const {
    return static_cast<double>(bytes) / (static_cast<double>(model_.elements()) * sizeof(float));
  }

  lamina::layout model_;
  lamina::selection arrived_;
  stopwatch since_last_;
  step_metrics metrics_;  // sums so far
  std::size_t frames_ = 0;
  std::size_t published_frames_ = 0;
  step_report batches_;  // of all workers as one
};

/// The workers' shares of one evaluation.
struct evaluation {
  std::uint64_t images = 0;
  std::uint64_t top1 = 0;  ///< images whose class came first
  std::uint64_t top5 = 0;  ///< among the first five

  double top1_accuracy() const { return static_cast<double>(top1) / static_cast<double>(images); }
  double top5_accuracy() const { return static_cast<double>(top5) / static_cast<double>(images); }
};

/// Adds up what the workers report of an evaluation, which may come from them at different times.
class evaluation_log {
 public:
  /// The whole evaluation of the parameters after `step`, once the last of so many reports with a share of it is there.
  std::optional<evaluation> add(std::uint64_t step, const step_report& report, std::size_t reports);

 private:
  struct shares {
    evaluation sum;
    std::size_t reports = 0;
  };
  std::map<std::uint64_t, shares> open_;
};

}  // namespace resnet50_ps
