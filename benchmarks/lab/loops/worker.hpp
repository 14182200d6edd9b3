// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/worker.hpp>
#include <memory>
#include <span>
#include <vector>

#include "loops/losses.hpp"
#include "loops/plan.hpp"
#include "messages/link.hpp"
#include "model/replica.hpp"

namespace lab {

struct worker_options {
  training_plan plan;
  lamina::compressor_options compression;
};

/// What the loop calls; all but the first may be empty.
struct worker_tasks {
  /// Fills the gradients of the replica, mostly by compute_gradients(), and the report on its batch.
  std::function<void(std::uint64_t step, step_report&)> compute;
  /// Evaluates the replica, whose statistics are the mean over the workers: sets the report's counts of test images.
  std::function<void(step_report&)> evaluate = {};
  /// The trained parameters stand in the replica, with such statistics; called once, before the last evaluation.
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
void work(worker_link& server, replica& local, const worker_tasks& tasks, const worker_options& options);

// What the loops of all workers have in common.

/// The mean over the workers takes the place of the values; all of them call it with as many.
using average_over_workers = std::function<void(std::span<double>)>;

/// Compresses the gradients that stand in the replica, and sends what is selected of them. The compressor is shared with the
/// frame on its way, which lies in its residual.
void send_gradients(worker_link& server,
                    const std::shared_ptr<lamina::gradient_compressor<float>>& compressor, gradient_way& way,
                    const replica& local, const training_plan& plan, std::uint64_t step, step_report report);

/// Takes the parameters that `step` begins with into the replica.
void apply_parameters(const message& parameters, const std::string& sender, replica& local,
                      std::uint64_t step);

/// What is done with the parameters of `step` before it is trained on: told of, hashed, evaluated and saved where that is due.
/// Begins the step's report. `clock` does not count evaluations.
step_report examine(replica& local, std::uint64_t step, const training_plan& plan, const worker_tasks& tasks,
                    work_clock& clock, const average_over_workers& average);

/// What a checkpoint holds of a worker: its compressor, if it has one, and what the tasks say; and back.
std::vector<std::byte> save_state(const lamina::gradient_compressor<float>* compressor,
                                  const worker_tasks& tasks);
void load_state(std::span<const std::byte> bytes, lamina::gradient_compressor<float>* compressor,
                const worker_tasks& tasks);

}  // namespace lab
