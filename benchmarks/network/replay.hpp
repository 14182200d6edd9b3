// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "messages/report.hpp"
#include "model/replica.hpp"

/// Gradients of a real training run, kept in files, and workers that play them back in place of computing: so that an
/// experiment on the network needs no accelerator, and its seconds are not those of the processor at hand.
namespace resnet50_ps {

/// Keeps the gradients of the last `count` steps of a worker in the directory, which is made if missing, as files of N
/// floats in the order of the layout. Throws std::runtime_error that names the file.
class gradient_recorder {
 public:
  gradient_recorder(std::string directory, std::size_t worker, std::uint64_t steps, std::uint64_t count);
  /// The gradients of `step`, if it is one of those.
  void record(std::uint64_t step, const replica& local) const;

 private:
  std::string directory_;
  std::size_t worker_;
  std::uint64_t first_step_;
};

/// Plays the recorded gradients of one worker again and again; with more workers than were recorded, two of them play the
/// same ones, one step apart.
class gradient_player {
 public:
  /// A step takes `compute_seconds`. Throws std::runtime_error, naming the directory, if it holds no recording, and the
  /// file if it is of another model.
  gradient_player(const std::string& directory, std::size_t worker, double compute_seconds,
                  const lamina::layout& model);
  /// The replica's gradients are those of the next step. Returns when as much time has passed as computing them takes.
  void play(replica& local, step_report& report);

 private:
  std::vector<std::vector<torch::Tensor>> recorded_;
  std::size_t next_;
  double compute_seconds_;
};

}  // namespace resnet50_ps
