// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <lamina/layout.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "records/metrics.hpp"
#include "records/progress.hpp"

namespace lab {

/// A row of the table at the end: means over the steps without the first, which sends the whole model and warms up.
struct run_summary {
  double worker_seconds = 0;
  double server_seconds = 0;
  double communication_seconds = 0;
  double total_seconds = 0;
  double sent_up = 0;
  double sent_down = 0;
  double loss = 0;      ///< over the last ten, as one batch alone is noisy
  double accuracy = 0;  ///< the same
  evaluation last_evaluation;
};

/// One training run from beginning to end.
struct run_result {
  std::string name;
  run_summary summary;
};

/// Prints steps as they come, on a terminal above a line that says how far the run is, and writes them into a run
/// directory where one is asked for: config.json says what was run, metrics.jsonl has a line for each step and each
/// evaluation, and one of counters at the end where packets were counted. `./benchmarks/lab/plot DIRECTORY` draws them.
class run_log {
 public:
  struct run {
    std::string name;
    std::string directory;  ///< empty: none is written
    std::string command_line;
    std::size_t workers = 0;
    std::uint64_t steps = 0;
    std::uint64_t interval = 1;        ///< between printed steps
    std::size_t progress_columns = 0;  ///< of the terminal; 0: it is none
    std::uint64_t steps_done = 0;      ///< before: what the directory says of later ones is taken out of it
  };

  /// Throws std::runtime_error, naming the file, if one cannot be written.
  run_log(run described, const lamina::layout& model);

  void record(const step_metrics& step);
  void record_evaluation(std::uint64_t step, const evaluation& seen);

  /// What was counted in the whole run, by name; nothing if there is nothing.
  void record_counters(const std::vector<std::pair<std::string, std::uint64_t>>& counters);

  run_result result() const;

 private:
  void write_config(const lamina::layout& model) const;
  void take_up_metrics();
  void write_line(const std::string& line);

  run run_;
  std::unique_ptr<std::FILE, decltype(&std::fclose)> json_{nullptr, &std::fclose};
  double elapsed_seconds_ = 0;
  std::vector<step_metrics> steps_;
  evaluation last_evaluation_;
  progress_line progress_;
};

/// The table at the end, in the shape of the paper's Table 1.
void print_table(const std::vector<run_result>& runs);

}  // namespace lab
