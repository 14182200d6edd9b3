// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/aggregator.hpp>
#include <lamina/server.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "loops/plan.hpp"
#include "messages/link.hpp"
#include "model/optimizer.hpp"
#include "model/replica.hpp"
#include "model/schedule.hpp"
#include "records/step_log.hpp"

namespace lab {

/// What a checkpoint holds beside the parameters.
struct server_state {
  std::uint64_t step = 0;            ///< steps done; 0 is the beginning
  std::vector<std::byte> optimizer;  ///< as state_of() makes them
  std::vector<std::vector<std::byte>> workers;
  std::string plan = {};  ///< of sums beside the computation, as plan::save() writes it; empty without
};

struct server_options {
  training_plan plan;
  sgd_options optimizer;
  learning_rate_schedule learning_rate;
  /// Of the asynchronous server: how many steps a client may be ahead of the slowest; none: any number.
  std::optional<std::uint64_t> staleness_steps = {};
};

/// What the loops call with results; each may be empty.
struct server_tasks {
  record_tasks records;
  /// The synchronous server has applied the gradients of a step, after so many seconds of work in it.
  std::function<void(double seconds)> updated;
  /// To be kept, with the parameters as they stand in the replica.
  std::function<void(const server_state&)> save;
};

/// What frames of parameters point into, shared with the sends: one to a worker that is lost may never end.
struct published_model {
  replica local;
  lamina::parameter_publisher<float> frames;
};

/// Runs the synchronous parameter server until step `steps`: sends the parameters, takes a gradient frame from every
/// client, applies the mean over the workers. At the end the workers hold the final parameters. Goes on after `from`, whose
/// parameters stand in the replica already. Throws lamina::decode_error for a bad frame, link_error for a lost peer and for a
/// worker whose replica is not what it should be.
void serve(server_link& workers, const replica& local, const server_options& options,
           const server_tasks& tasks, server_state from = {});

/// The asynchronous one: applies each gradient frame when it comes and answers its client with what that
/// client has not seen, for `steps` frames a client. The answer is a copy that goes on its way while others
/// are heard, one to a client at a time: a client that takes it slowly holds up nobody. One that is more than
/// `staleness_steps` ahead of the slowest gets its answer when that has caught up; with 0 all begin each step
/// together. The last answer waits for the last frames of all: the replicas end equal, which is checked, and
/// the last means are over all clients. A frame's weight is its workers / W. One frame of each client therefore
/// moves the parameters as far as a step of the synchronous server, momentum and decay included, and the same
/// learning rate suits both. To the optimizer, the schedule and the metrics a step is one frame for each client.
/// Makes no checkpoints.
void serve_asynchronously(server_link& workers, const replica& local, const server_options& options,
                          const server_tasks& tasks);

/// Throws link_error, naming the worker, for a report whose hash is of other parameters than the server's; 0 is none.
void check_replicas(std::span<const pushed> reports, const replica& local, std::uint64_t step,
                    const server_link& workers);

/// Takes the frames of a step from all clients that are left; without those that were lost the step is closed. What comes back is to
/// be kept until the next step: the aggregator points into it. Throws link_error for a bad frame and for another replica.
[[nodiscard]] std::vector<pushed> take_frames(server_link& workers, const replica& local, std::uint64_t step,
                                              step_log& log, lamina::gradient_aggregator<float>& into);
/// The end of a run: the last reports go into the log. Throws link_error for another replica.
void finish(server_link& workers, const replica& local, std::uint64_t step, step_log& log);

/// The optimizer's part of a state; and back. Throws link_error for that of another one.
std::vector<std::byte> state_of(const sgd& optimizer);
void take_up(std::span<const std::byte> state, sgd& optimizer);

/// The workers' parts, of which each client gets those that it speaks for; and back.
void send_states(server_link& workers, const server_state& from);
std::vector<std::vector<std::byte>> receive_states(server_link& workers);

}  // namespace lab
