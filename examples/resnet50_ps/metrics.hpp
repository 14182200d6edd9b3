// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <lamina/layout.hpp>
#include <memory>
#include <string>
#include <vector>

#include "transport.hpp"

namespace resnet50_ps {

/// Seconds since its construction.
class stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(clock::now() - start_).count(); }

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point start_ = clock::now();
};

/// One synchronous step as the server saw it. Sent fractions are bytes of frames over bytes of all parameters
/// in float: up, the mean of the workers; down, the frame that publishes this step's update.
struct step_metrics {
  std::uint64_t step = 0;
  double loss = 0;      ///< mean over the workers' batches
  double accuracy = 0;  ///< on the training batches, before the update
  double sent_up = 0;
  double sent_down = 0;
  double worker_seconds = 0;         ///< compute of the slowest worker
  double server_seconds = 0;         ///< decode, mean, update, encode
  double communication_seconds = 0;  ///< the rest of the step
  double total_seconds = 0;
};

step_metrics summarize(std::uint64_t step, const std::vector<message>& messages, std::size_t published_bytes,
                       const lamina::layout& model, double server_seconds, double total_seconds);

/// One training run from beginning to end.
struct run_result {
  std::string name;
  std::vector<step_metrics> steps;
  double test_accuracy = 0;
};

/// Prints steps as they come, and writes each as one line of JSON where asked.
class step_log {
 public:
  /// Prints the first step, every `interval`-th and the last. An empty `json_path` writes no file. Throws
  /// std::runtime_error, naming the file, if it cannot be opened.
  step_log(std::uint64_t steps, std::uint64_t interval, const std::string& json_path);

  void begin_run(const std::string& name);
  /// Throws std::runtime_error if the file cannot be written.
  void record(const step_metrics& step);

 private:
  struct close_file {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::uint64_t steps_;
  std::uint64_t interval_;
  std::string json_path_;
  std::unique_ptr<std::FILE, close_file> json_;
  std::string run_name_;
};

/// The table at the end, in the shape of the paper's Table 1: mean seconds a step, without the first, which
/// sends the whole model and warms up.
void print_table(const std::vector<run_result>& runs);

}  // namespace resnet50_ps
