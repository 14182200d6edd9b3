// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "messages/link.hpp"
#include "model/replica.hpp"

/// A flat, synchronous parameter server whose workers decide on a layer as soon as its gradient is there.
namespace lab {

struct streaming_options {
  /// Gradients leave in parts while the backward pass goes on, and parameters come in parts; else whole frames go as in serve().
  bool is_in_parts = false;
  /// A layer of the parameters is waited for where the next forward pass needs it; else all are at the end of a step.
  bool reaches_forward = false;
  /// A part has at least so many bytes of layers, or ends the step; 0: a part for each layer.
  std::size_t part_bytes = std::size_t{1} << 20;
};

/// Runs one worker until step `steps`, as work() does, but for when layers are decided: hooks hand each to the compressor when its
/// gradient is complete, in the order of the backward pass (`options.compression.decide` must be as_ready). What is decided then
/// does not depend on `streaming`: neither do the parameters of any step, bit for bit.
///
/// In parts, messages move on at each hook, and while the worker waits; parameters that come during the backward pass are of layers whose
/// gradients are complete, and are written at once. The replica is whole in steps that are evaluated, compared or saved, and at the
/// end; tasks.pulled is called with parameters that are whole in those steps alone. The server is serve(), or in parts
/// serve_in_parts(). Errors as work(), and unused_parameter of lamina.
void work_as_ready(worker_link& server, replica& local, const worker_tasks& tasks,
                   const worker_options& options, const streaming_options& streaming);

/// Runs the server of such workers, as serve() does: takes parts as they come, updates a layer when all workers have decided it, and
/// sends updated layers on in parts while gradients still come. It waits for nobody while it sends: a slow worker has its parts
/// queued. Each step's parameters are read where they lie, and are written again when all have them. Errors as serve(); one client
/// that is lost ends all.
void serve_in_parts(server_link& workers, const replica& local, const server_options& options,
                    const streaming_options& streaming, const server_tasks& tasks, server_state from = {});

}  // namespace lab
