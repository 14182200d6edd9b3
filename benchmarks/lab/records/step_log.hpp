// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/layout.hpp>
#include <lamina/selection.hpp>
#include <map>
#include <span>

#include "messages/link.hpp"
#include "records/metrics.hpp"
#include "records/stopwatch.hpp"

namespace lab {

/// Who is told of what a run does; each may be empty.
struct record_tasks {
  std::function<void(const step_metrics&)> record;
  /// The workers have evaluated the parameters that stood after `step`.
  std::function<void(std::uint64_t step, const evaluation&)> record_evaluation;
};

/// Puts a step's metrics together while it runs, of what comes from the workers, or from the leaders of their nodes.
class step_log {
 public:
  /// The server's seconds are those of the clock.
  step_log(const lamina::layout& model, const record_tasks& tasks, work_clock& clock)
      : model_(model), tasks_(tasks), clock_(clock), arrived_(model) {}

  /// A frame of parameters went to so many.
  void published(std::size_t frame_bytes, std::size_t receivers);
  /// What became of it on its way; nothing, where nothing can be lost.
  void lost(std::span<const sent_frame> parameters);
  /// The gradients of all for a step; they come to be applied.
  void received(std::span<const pushed> gradients, std::uint64_t step);
  /// The last reports, to what would be that step.
  void finished(std::span<const pushed> reports, std::uint64_t step);
  /// One frame of gradients, which had not seen so many others, was applied.
  void applied(const pushed& gradients, const lamina::selection& layers, std::uint64_t staleness_frames);

  /// What came with a frame of so many bytes.
  void add_report(const step_report& report, std::size_t frame_bytes, std::uint64_t staleness_frames = 0);
  /// And over which way.
  void add_transfer(const pushed& gradients);
  /// What transfers of gradients took, where there is no server that they come to.
  void add_transfers(const transfer_cost& up) { transfers().up += up; }
  /// The step's sums ran beside the computation.
  void overlapped(const overlap_metrics& seen) { metrics_.overlap = seen; }
  /// The share in an evaluation that a report of `step` may hold; told on when there are as many as reports.
  void evaluated(const step_report& report, std::uint64_t step, std::size_t reports);

  /// Tells of the frames since the last call; the time is counted from then, too.
  void finish_step(std::uint64_t step, float learning_rate);
  void finish_step(std::uint64_t step, float learning_rate, const lamina::selection& arrived);
  /// Counts the time from now on and not from the last step's end.
  void restart();

 private:
  struct shares {
    evaluation sum;
    std::size_t reports = 0;
  };

  double share_of_model(std::size_t bytes) const {
    return static_cast<double>(bytes) / (static_cast<double>(model_.elements()) * sizeof(float));
  }

  lamina::layout model_;
  const record_tasks& tasks_;
  work_clock& clock_;
  lamina::selection arrived_;
  stopwatch since_last_;
  transfer_metrics& transfers() {
    if (!metrics_.transfers) metrics_.transfers.emplace();
    return *metrics_.transfers;
  }

  step_metrics metrics_;  // sums so far
  std::size_t frames_ = 0;
  std::size_t published_frames_ = 0;
  step_report batches_;  // of all workers as one
  std::map<std::uint64_t, shares>
      shares_;  // of evaluations that are not whole, by the step after which they are
};

}  // namespace lab
