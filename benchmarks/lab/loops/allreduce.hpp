// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "messages/transfer.hpp"
#include "messages/worker_group.hpp"
#include "model/replica.hpp"
#include "records/step_log.hpp"

namespace lab {

/// Runs one worker of a run without a server: all agree which layers to send, add those up among themselves, and apply their mean, each to
/// a replica and with an optimizer of its own. To the last bit what a synchronous server makes of agreed selection, where the layers are
/// not chosen a step ahead (`worker.compression.decide`) and nothing may be lost. What is lost on its way to the owners of slices stays in
/// the residual of who sent it, unless the plan wants it gone. Worker 0 keeps the records: on it alone `records` and `from.workers` count.
/// Errors as serve() and work().
void train_by_allreduce(worker_group& group, replica& local, const worker_tasks& tasks,
                        const worker_options& worker, const server_options& server,
                        const server_tasks& records, server_state from);

/// What a worker begins with beside the parameters; of a run that resumes, else empty.
struct beginning {
  std::vector<std::byte> optimizer;  ///< the same for all
  std::vector<std::byte> own;
};
/// All begin with the parameters of worker 0, which gives each what the state has of it.
beginning begin_alike(worker_group& group, replica& local, server_state from);
/// A checkpoint after `step`, which worker 0 keeps, of what all have alike and of each one's own.
void save_together(worker_group& group, std::uint64_t step, std::vector<std::byte> optimizer,
                   std::vector<std::byte> own, const server_tasks& records, std::string plan = {});

/// What a step took of one worker.
struct step_traffic {
  std::size_t moved_bytes = 0;               ///< each way
  std::optional<transfer_cost> transfers{};  ///< none: nothing can be lost
};

/// Worker 0 tells the log what all of them report of `step`, and that the replicas are the same. All call it, at the step's end.
void log_step(worker_group& group, const step_report& report, std::uint64_t step, const step_traffic& traffic,
              step_log& log);
/// The same of the last reports.
void log_end(worker_group& group, const step_report& report, std::uint64_t step, step_log& log);

}  // namespace lab
