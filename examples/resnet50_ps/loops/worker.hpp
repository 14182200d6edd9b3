// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/worker.hpp>
#include <span>
#include <vector>

#include "data/batches.hpp"
#include "messages/link.hpp"
#include "model/replica.hpp"

namespace resnet50_ps {

struct worker_options {
  std::uint64_t steps = 0;
  lamina::compressor_options compression;
  /// The workers average their layers' values and so all select the same layers.
  bool agrees_on_selection = false;
  std::uint64_t evaluation_period_steps = 0;  ///< 0: at the end alone
  std::uint64_t hash_period_steps =
      100;  ///< how often the server gets the hash of the replica; 0: at the end alone
  std::uint64_t checkpoint_period_steps = 0;  ///< how often the server gets the worker's state; 0: never
  std::uint64_t steps_done = 0;  ///< of a run that resumes: the server begins by sending the worker's state
};

/// What the loop calls; all but the first may be empty.
struct worker_tasks {
  /// Fills the gradients of the replica, mostly by compute_gradients(), and the report on its batch.
  std::function<void(std::uint64_t step, step_report&)> compute;
  /// Evaluates the replica: sets the report's counts of test images.
  std::function<void(step_report&)> evaluate = {};
  /// The trained parameters stand in the replica; called once, before the last evaluation.
  std::function<void()> finished = {};
  /// New parameters stand in the replica: those that `step` begins with; called `steps` + 1 times in all.
  std::function<void(std::uint64_t step)> pulled = {};
  /// What a checkpoint holds of the worker beside its compressor; and takes it up again.
  std::function<std::vector<std::byte>()> save = {};
  std::function<void(std::span<const std::byte>)> load = {};
};

/// Runs one worker until step `steps`: takes the parameters into the replica, computes the gradients of a batch, sends the
/// layers that layer dropping selects; at the end a last report. Throws lamina::decode_error for a bad frame,
/// lamina::non_finite_gradient when training diverges, link_error for a lost server.
void work(worker_link& link, replica& local, const worker_tasks& tasks, const worker_options& options);

}  // namespace resnet50_ps
