// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <lamina/collectives/collectives.hpp>
#include <string>

#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "messages/worker_group.hpp"
#include "model/replica.hpp"

namespace lab {

/// How gradients are summed beside the computation.
struct overlap_options {
  /// A layer of the last step is waited for where the next forward pass needs it.
  bool reaches_forward = false;
  /// Each worker updates its slices of all layers, and hands the parameters round.
  bool has_owners = false;
  lamina::collectives::progress_by progress = lamina::collectives::progress_by::thread;
  lamina::collectives::plan_options plan = {};
  /// The plan of an earlier run, in place of one made by the options, as plan::save() writes it; on worker 0 alone. Empty: none.
  std::string earlier_plan = {};
  std::string earlier_plan_is_from = {};  ///< for messages
  /// Is told of the plan on worker 0, once; may be empty.
  std::function<void(const lamina::collectives::plan&)> planned = {};
  /// The costs of the network are measured before the first step; else they are those of gigabit Ethernet.
  bool is_calibrated = false;
  std::chrono::milliseconds timeout = std::chrono::minutes(2);  ///< of a worker that is silent
  lamina::collectives::timeline* record = nullptr;
};

/// Runs one worker of a run without a server whose gradients are summed while they are computed: hooks hand each layer over as soon as
/// its gradient is complete. The first step records in which order that is, and overlaps with nothing. The mean of a layer is applied
/// where the next forward pass needs the layer, through the gates of the network, or at the end of the step. The replica is whole in
/// steps that are evaluated, compared or saved, and at the end. A run that resumes goes on with the plan of `from`, if that has one, and
/// overlaps from its first step on.
///
/// Without layer dropping gradients are summed as they are; with it, layers are chosen one step ahead (`worker.compression.decide` must
/// say so) and what is held back stays in the residual. The sums of algorithm::pairwise are those of train_by_allreduce() with the same choice,
/// bit for bit, and so are the replicas.
///
/// `over` is of the ranks of `group`, in its order; tasks.pulled is called with parameters that are whole in those steps alone. Errors as
/// train_by_allreduce(), and channel_error, plan_error, unused_parameter, non_finite_gradient of lamina.
void train_overlapped(worker_group& group, lamina::collectives::channel& over, replica& local,
                      const worker_tasks& tasks, const worker_options& worker, const server_options& server,
                      const overlap_options& options, const server_tasks& records, server_state from);

}  // namespace lab
