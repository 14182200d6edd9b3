// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/layout.hpp>
#include <optional>
#include <vector>

#include "link.hpp"
#include "metrics.hpp"
#include "optimizer.hpp"
#include "replica.hpp"
#include "schedule.hpp"

namespace resnet50_ps {

/// What a checkpoint holds beside the parameters.
struct server_state {
  std::uint64_t step = 0;       ///< steps done
  std::vector<float> velocity;  ///< of the optimizer; empty without momentum
  std::vector<std::vector<std::byte>> workers;
};

struct server_options {
  std::uint64_t steps = 0;
  sgd_options optimizer;
  learning_rate_schedule learning_rate;
  std::uint64_t checkpoint_period_steps = 0;  ///< 0: never
  std::optional<server_state> resume;  ///< goes on from there; the parameters stand in the store already
};

/// What the loops call with results; each may be empty.
struct server_tasks {
  std::function<void(const step_metrics&)> record;
  /// The workers have evaluated the parameters that stood after `step`.
  std::function<void(std::uint64_t step, const evaluation&)> record_evaluation;
  /// To be kept, with the parameters as they stand in the store.
  std::function<void(const server_state&)> save;
};

/// Runs the synchronous parameter server for `steps` steps: sends the parameters, takes a gradient frame from every
/// worker, applies their mean. At the end the workers hold the final parameters. Throws lamina::decode_error for a bad
/// frame, link_error for a lost peer and for a worker whose replica is not what it should be.
void serve(server_link& link, const lamina::layout& model, const parameter_store& parameters,
           const server_options& options, const server_tasks& tasks);

/// The asynchronous one: applies each gradient frame when it comes and answers its worker with what that worker has not
/// seen, for `steps` frames a worker. A frame counts as one of W, so that W frames move the parameters as far as a step of
/// the synchronous server and the same learning rate suits both; a step, to the schedule and to the metrics, is W frames.
/// Makes no checkpoints.
void serve_asynchronously(server_link& link, const lamina::layout& model, const parameter_store& parameters,
                          const server_options& options, const server_tasks& tasks);

}  // namespace resnet50_ps
