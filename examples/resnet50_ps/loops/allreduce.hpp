// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "messages/link.hpp"
#include "model/replica.hpp"

namespace resnet50_ps {

/// All workers of a run without a server.
class worker_group : public worker_peers {
 public:
  /// Every rank is a worker.
  explicit worker_group(transport& ranks);

  std::string name_of(std::size_t worker) const { return transport_.name_of(worker); }

  /// Replaces `values` by their sum over the workers, added in the order of the workers, so the same bits on all of them
  /// and at every run: each worker sums one slice of them and sends it to the others. Moves 2 (W-1)/W of the bytes in
  /// and out of each worker, as few as an allreduce can.
  void sum(std::span<float> values);

  using worker_peers::average;
  void average(std::span<double> values) override;
  void show_life() override { transport_.show_life(); }

  /// Worker 0 gets a message of every worker, its own first; the others get none.
  std::vector<message> gather(const step_report& report, std::span<const std::byte> bytes);
  /// Worker 0 makes the bytes of each worker; all get theirs.
  std::vector<std::byte> scatter(const std::function<std::vector<std::byte>(std::size_t worker)>& make);

 private:
  template <class Outgoing, class Take>
  void exchange_with_all(Outgoing outgoing, Take take);

  transport& transport_;
  std::vector<std::size_t> others_;
  std::vector<std::byte> own_;  // what a message of gather() points into
};

/// Runs one worker of a run without a server: all agree which layers to send, add those up among themselves, and apply
/// their mean, each to a replica and with an optimizer of its own. To the last bit what a synchronous server makes of
/// agreed selection. `worker.compression` must not change the payload. Worker 0 keeps the records: on it alone `records`
/// and `from.workers` count. Errors as serve() and work().
void train_by_allreduce(worker_group& group, replica& local, const worker_tasks& tasks,
                        const worker_options& worker, const server_options& server,
                        const server_tasks& records, server_state from);

}  // namespace resnet50_ps
