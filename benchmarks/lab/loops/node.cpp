// SPDX-License-Identifier: MIT
#include "loops/node.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "records/stopwatch.hpp"

namespace lab {
namespace {

// The mean over all workers, of whom the server hears those of this node as one.
void average_in_node(worker_link& server, server_link& members, std::span<double> values) {
  value_sum sum;
  sum.add(values, 1);
  for (const message& each : members.receive_from_all(message_kind::values)) sum.add(each);
  server.average(sum.values, sum.workers);
  members.send_to_all(message_kind::mean, payload(std::as_bytes(std::span(std::as_const(sum.values)))));
  std::ranges::copy(sum.values, values.begin());
}

step_report merge_report(const step_report& report, const pushed& from, const std::string& name,
                         std::uint64_t step) {
  if (from.report.replica_hash != report.replica_hash) throw other_replica(name, step);
  // Here, where it is known whose it is: the sum of the node is NaN as well.
  if (!std::isfinite(from.report.loss))
    throw link_error(name + ": the loss is not finite in step " + std::to_string(step));
  return merged(report, from.report);
}

// Adds the members' gradients of `step` to the leader's, and says how long the node takes.
void add_members(worker_link& server, server_link& members, replica& local, std::uint64_t step,
                 double handing_on_seconds, step_report& report) {
  const double own_seconds = server.clock().seconds() - handing_on_seconds;
  const stopwatch summing;
  report.compute_seconds = own_seconds;
  for (const pushed& each : members.receive_gradients()) {
    const std::string name = members.name_of(each.sender);
    report = merge_report(report, each, name, step);
    const std::size_t expected = local.model().elements() * sizeof(float);
    if (each.bytes.size() != expected) {
      throw link_error(name + " sent " + std::to_string(each.bytes.size()) + " bytes of gradients in step " +
                       std::to_string(step) + ", not " + std::to_string(expected));
    }
    const auto* next = reinterpret_cast<const float*>(each.bytes.data());
    for (std::size_t l = 0; l < local.model().layers(); ++l) {
      for (float& sum : local.gradient(l)) sum += *next++;
    }
  }
  // The wait for one that computes longer is the slowest worker's time, not the node's.
  const double waited_seconds = report.compute_seconds - own_seconds;
  report.node_seconds = handing_on_seconds + std::max(0.0, summing.seconds() - waited_seconds);
}

double hand_on(const message& parameters, server_link& members) {
  const stopwatch handing_on;
  members.send_to_all(message_kind::parameters, payload(parameters));
  return handing_on.seconds();
}

// The leader's own state; the members get theirs.
std::vector<std::byte> receive_states(worker_link& server, server_link& members) {
  std::vector<std::vector<std::byte>> states = server.receive_states(1 + members.clients());
  for (std::size_t m = 0; m < members.clients(); ++m) {
    members.send(m, message_kind::state, payload(pack({&states[m + 1], 1})));
  }
  return std::move(states[0]);
}

void send_states(worker_link& server, server_link& members, std::vector<std::byte> own) {
  std::vector<std::vector<std::byte>> states = {std::move(own)};
  for (const message& each : members.receive_from_all(message_kind::state)) {
    for (auto& member : unpack(each.bytes)) states.push_back(std::move(member));
  }
  server.send_states(states);
}

}  // namespace

void lead_node(worker_link& server, server_link& members, replica& local, const worker_tasks& tasks,
               const worker_options& options) {
  const training_plan& plan = options.plan;
  const auto compressor =
      std::make_shared<lamina::gradient_compressor<float>>(local.partition().model(), options.compression);
  gradient_way way(plan.losses, compressor->parts(), options.compression.payload);
  if (plan.steps_done > 0) load_state(receive_states(server, members), compressor.get(), tasks);
  for (std::uint64_t step = plan.steps_done + 1;; ++step) {
    const message parameters = server.receive_parameters();
    const double handing_on_seconds = hand_on(parameters, members);
    apply_parameters(parameters, server.name_of_server(), local, step);
    step_report report = examine(local, step, plan, tasks, server.clock(), [&](std::span<double> statistics) {
      average_in_node(server, members, statistics);
    });
    if (plan.is_over(step)) {
      for (const pushed& each : members.receive_last_reports())
        report = merge_report(report, each, members.name_of(each.sender), step);
      return server.finish(report);
    }

    tasks.compute(step, report);
    add_members(server, members, local, step, handing_on_seconds, report);
    send_gradients(server, compressor, way, local, plan, step,
                   report);  // from here on the node is one worker

    if (plan.makes_checkpoint_after(step)) send_states(server, members, save_state(compressor.get(), tasks));
  }
}

void work_in_node(worker_link& leader, replica& local, const worker_tasks& tasks,
                  const worker_options& options) {
  const training_plan& plan = options.plan;
  if (plan.steps_done > 0) load_state(leader.receive_states(1)[0], nullptr, tasks);
  for (std::uint64_t step = plan.steps_done + 1;; ++step) {
    apply_parameters(leader.receive_parameters(), leader.name_of_server(), local, step);
    step_report report = examine(local, step, plan, tasks, leader.clock(),
                                 [&](std::span<double> statistics) { leader.average(statistics); });
    if (plan.is_over(step)) return leader.finish(report);

    tasks.compute(step, report);
    // As they lie, and no frame: it would be hashed at both ends, for a way that mostly stays within a machine.
    std::vector<std::span<const std::byte>> gradients;
    for (std::size_t l = 0; l < local.model().layers(); ++l)
      gradients.push_back(std::as_bytes(local.gradient(l)));
    const auto owner = std::make_shared<std::vector<torch::Tensor>>(local.gradients());
    leader.push(report, {gradients, owner});

    if (plan.makes_checkpoint_after(step)) leader.send_states({{save_state(nullptr, tasks)}});
  }
}

}  // namespace lab
