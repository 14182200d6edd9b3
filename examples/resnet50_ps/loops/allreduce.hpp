// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "messages/worker_group.hpp"
#include "model/replica.hpp"
#include "records/step_log.hpp"

namespace resnet50_ps {

/// Runs one worker of a run without a server: all agree which layers to send, add those up among themselves, and apply
/// their mean, each to a replica and with an optimizer of its own. To the last bit what a synchronous server makes of
/// agreed selection, where the layers are not chosen a step ahead (`worker.compression.decide`). `worker.compression` must not
/// change the payload. Worker 0 keeps the records: on it alone `records` and `from.workers` count. Errors as serve() and work().
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

/// Worker 0 tells the log what all of them report of `step`, in which so many bytes moved each way through each of them, and
/// that the replicas are the same. All call it, at the step's end.
void log_step(worker_group& group, const step_report& report, std::uint64_t step, std::size_t moved_bytes,
              step_log& log);
/// The same of the last reports.
void log_end(worker_group& group, const step_report& report, std::uint64_t step, step_log& log);

}  // namespace resnet50_ps
