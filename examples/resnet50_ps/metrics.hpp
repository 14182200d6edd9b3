// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <lamina/layout.hpp>
#include <lamina/selection.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "link.hpp"

namespace resnet50_ps {

/// Seconds since its construction.
class stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(clock::now() - start_).count(); }

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point start_ = clock::now();
};

/// One step as the server saw it: a synchronous one, or W frames of the asynchronous server. Sent fractions are bytes of
/// frames over bytes of all parameters in float, as means over the workers.
struct step_metrics {
  std::uint64_t step = 0;
  double loss = 0;       ///< mean over the workers' batches
  double accuracy = 0;   ///< on the training batches, before the update
  double sent_up = 0;    ///< of the gradients
  double sent_down = 0;  ///< of the parameters that this step began with
  double threshold = 0;  ///< mean over the workers
  double staleness =
      0;  ///< frames applied between a worker's pull and its push, mean; 0 for the synchronous server
  float learning_rate = 0;
  std::vector<std::size_t> arrived;  ///< layers that at least one worker sent
  double worker_seconds = 0;         ///< compute of the slowest worker
  double server_seconds = 0;         ///< decode, mean, update, encode
  double communication_seconds = 0;  ///< the rest of the step
  double total_seconds = 0;
};

/// Puts a step's metrics together while it runs.
class step_summary {
 public:
  explicit step_summary(const lamina::layout& model) : model_(model), arrived_(model) {}

  /// Counts the time from now on and not from the last finish().
  void begin() { since_last_ = stopwatch(); }
  void add_frame(const message& frame, std::uint64_t staleness_frames = 0);
  void add_arrived(const lamina::selection& layers);
  /// A frame of parameters that went to so many workers.
  void add_published(std::size_t bytes, std::size_t workers);
  void add_server_seconds(double seconds) { metrics_.server_seconds += seconds; }
  /// An evaluation at the beginning of a step is no part of it.
  void leave_out(double evaluation_seconds) {
    evaluation_seconds_ = std::max(evaluation_seconds_, evaluation_seconds);
  }
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
  double evaluation_seconds_ = 0;
  std::size_t frames_ = 0;
  std::size_t published_frames_ = 0;
  std::uint64_t correct_ = 0;
  std::uint64_t images_ = 0;
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
  explicit evaluation_log(std::size_t workers) : workers_(workers) {}
  /// The whole evaluation of the parameters after `step`, once the last worker's share of it is there.
  std::optional<evaluation> add(std::uint64_t step, const step_report& report);

 private:
  struct shares {
    evaluation sum;
    std::size_t workers = 0;
  };
  std::size_t workers_;
  std::map<std::uint64_t, shares> open_;
};

/// One training run from beginning to end.
struct run_result {
  std::string name;
  std::vector<step_metrics> steps;
  evaluation last_evaluation;
};

/// Prints steps as they come, and writes them into a run directory where one is asked for: config.json says what was run,
/// metrics.jsonl has a line for each step and each evaluation. `./examples/resnet50_ps/plot DIRECTORY` draws them.
class run_log {
 public:
  struct run {
    std::string name;
    std::string directory;  ///< empty: none is written
    std::string command_line;
    std::size_t workers = 0;
    std::uint64_t steps = 0;
    std::uint64_t interval = 1;    ///< between printed steps
    std::uint64_t steps_done = 0;  ///< before: what the directory says of later ones is taken out of it
  };

  /// Throws std::runtime_error, naming the file, if one cannot be written.
  run_log(run described, const lamina::layout& model);

  void record(const step_metrics& step);
  void record_evaluation(std::uint64_t step, const evaluation& seen);

  run_result result() const { return result_; }

 private:
  void write_config(const lamina::layout& model) const;
  void take_up_metrics();
  void write_line(const std::string& line);

  run run_;
  std::unique_ptr<std::FILE, decltype(&std::fclose)> json_{nullptr, &std::fclose};
  double elapsed_seconds_ = 0;
  run_result result_;
};

/// The table at the end, in the shape of the paper's Table 1: mean seconds a step, without the first, which
/// sends the whole model and warms up.
void print_table(const std::vector<run_result>& runs);

}  // namespace resnet50_ps
