// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <lamina/outer_step.hpp>

#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "messages/link.hpp"
#include "messages/worker_group.hpp"
#include "model/replica.hpp"

/// Local updates: each worker makes the steps of its own optimizer at once, on parameters y of its own, and what it did that
/// the others have not seen, its drift from the parameters x that all share, is brought together part by part. See
/// docs/learning/local-updates.md. In the replica stands y, but x while it is compared, evaluated or saved.
namespace lab {

struct local_options {
  /// D: the update of a step is applied so many steps later; those that are left, at the end.
  std::uint64_t delay_steps = 0;
  lamina::outer_options outer;
};

/// Runs one worker until step `steps`. Its optimizer and learning rate are those that `serving` has. With a delay the update of a
/// step comes while the next is computed. Errors as work(), and lamina::non_finite_gradient for a drift that is not finite.
void work_on_local_updates(worker_link& server, replica& local, const worker_tasks& tasks,
                           const worker_options& options, const server_options& serving,
                           const local_options& how);

/// Runs the synchronous server: takes a frame of updates from every worker, and answers all with what the outer step makes of
/// their mean. x stands in its replica. With a delay replicas are compared at the end alone. Errors as serve().
void serve_local_updates(server_link& workers, const replica& local, const server_options& options,
                         const local_options& how, const server_tasks& tasks, server_state from = {});

/// Runs one worker of a run without a server, by agreed selection: to the last bit what serve_local_updates() makes of it. The sums
/// of a step are waited for, whatever the delay. Arguments and errors as train_by_allreduce().
void train_on_local_updates(worker_group& group, replica& local, const worker_tasks& tasks,
                            const worker_options& worker, const server_options& server,
                            const local_options& how, const server_tasks& records, server_state from);

}  // namespace lab
