// SPDX-License-Identifier: MIT
#pragma once

#include "loops/worker.hpp"
#include "messages/link.hpp"
#include "model/replica.hpp"

/// The workers of a node, of whom the first, the leader, sends for all.
namespace lab {

/// Runs the leader. To the server it is a worker whose gradient is the sum over the node, its own first and then in the order
/// of the members; to the members it is the server: it hands on what comes and takes their gradients whole. Errors as work().
void lead_node(worker_link& server, server_link& members, replica& local, const worker_tasks& tasks,
               const worker_options& options);

/// Runs a member: as work(), but each gradient goes to the leader whole, and none is kept.
void work_in_node(worker_link& leader, replica& local, const worker_tasks& tasks,
                  const worker_options& options);

}  // namespace lab
