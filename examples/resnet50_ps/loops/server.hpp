// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/layout.hpp>
#include <string>
#include <vector>

#include "messages/link.hpp"
#include "model/optimizer.hpp"
#include "model/replica.hpp"
#include "model/schedule.hpp"
#include "records/metrics.hpp"

namespace resnet50_ps {

/// What a checkpoint holds beside the parameters.
struct server_state {
  std::uint64_t step = 0;                 ///< steps done; 0 is the beginning
  std::vector<float> velocity;            ///< of the optimizer; empty without momentum
  std::vector<std::uint64_t> updated_in;  ///< the same: each layer's last step
  std::vector<std::vector<std::byte>> workers;
};

struct server_options {
  std::uint64_t steps = 0;
  sgd_options optimizer;
  learning_rate_schedule learning_rate;
  std::uint64_t checkpoint_period_steps = 0;  ///< 0: never
  double least_update_seconds =
      0;  ///< an update takes so long, as on another machine: of the synchronous server
};

/// What the loops call with results; each may be empty.
struct server_tasks {
  std::function<void(const step_metrics&)> record;
  /// The workers have evaluated the parameters that stood after `step`.
  std::function<void(std::uint64_t step, const evaluation&)> record_evaluation;
  /// To be kept, with the parameters as they stand in the store.
  std::function<void(const server_state&)> save;
};

/// Runs the synchronous parameter server until step `steps`: sends the parameters, takes a gradient frame from every
/// client, applies the mean over the workers. At the end the workers hold the final parameters. Goes on after `from`, whose
/// parameters stand in the store already. Throws lamina::decode_error for a bad frame, link_error for a lost peer and for a
/// worker whose replica is not what it should be.
void serve(server_link& link, const lamina::layout& model, const parameter_store& parameters,
           const server_options& options, const server_tasks& tasks, server_state from = {});

/// The asynchronous one: applies each gradient frame when it comes and answers its client with what that client has not
/// seen, for `steps` frames a client. A frame counts as its workers of all W, so that a frame of each client moves the
/// parameters as far as a step of the synchronous server, momentum and decay included, and the same learning rate suits both; a
/// step, to the optimizer, the schedule and the metrics, is that many frames. Makes no checkpoints.
void serve_asynchronously(server_link& link, const lamina::layout& model, const parameter_store& parameters,
                          const server_options& options, const server_tasks& tasks);

/// What came with the reports that begin `step`: evaluations are recorded, and a hash of a replica that is not
/// `expected_hash()` throws link_error with `name_of(message::sender)`.
void take_reports(const std::vector<message>& messages, std::uint64_t step,
                  const std::function<std::uint64_t()>& expected_hash,
                  const std::function<std::string(std::size_t)>& name_of, evaluation_log& evaluations,
                  const server_tasks& tasks);

}  // namespace resnet50_ps
