// SPDX-License-Identifier: MIT
#pragma once

#include <lamina/layout.hpp>

#include "loops/worker.hpp"
#include "messages/link.hpp"
#include "model/replica.hpp"

namespace resnet50_ps {

/// The first worker of a node, which sends for all of it. To the server it is a worker whose gradient is the sum over the
/// node; to the others of the node, the members, it is the server: it hands on what comes and takes their gradients whole.
class node_leader : public worker_link {
 public:
  /// `members` are ranks; see worker_link.
  node_leader(transport& ranks, std::size_t server, std::size_t workers, std::size_t worker,
              const std::vector<std::size_t>& members, lamina::layout model);

  std::span<const std::byte> receive() override;
  using worker_link::average;
  void average(std::span<double> values) override;
  /// Sums in the order of the workers, its own first.
  void add_node(std::uint64_t step, const gradient_store& gradients, step_report& report) override;
  void send_state(const std::vector<std::byte>& state) override;
  std::vector<std::byte> receive_state() override;

 private:
  server_link members_;
  lamina::layout model_;
  double handing_on_seconds_ = 0;
};

/// Runs a member for `options.steps` steps: as work(), but each gradient goes to the leader whole, and none is kept.
void work_as_member(worker_link& leader, replica& local, const worker_tasks& tasks,
                    const worker_options& options);

}  // namespace resnet50_ps
