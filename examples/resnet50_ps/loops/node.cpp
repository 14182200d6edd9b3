// SPDX-License-Identifier: MIT
#include "loops/node.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "loops/worker_step.hpp"
#include "records/metrics.hpp"

namespace resnet50_ps {
namespace {

std::vector<client> clients_on(const std::vector<std::size_t>& ranks) {
  std::vector<client> clients;
  for (const std::size_t rank : ranks) clients.push_back({.rank = rank});
  return clients;
}

}  // namespace

node_leader::node_leader(transport& ranks, std::size_t server, std::size_t workers, std::size_t worker,
                         const std::vector<std::size_t>& members, lamina::layout model)
    : worker_link(ranks, server, workers, worker),
      members_(ranks, clients_on(members)),
      model_(std::move(model)) {}

std::span<const std::byte> node_leader::receive() {
  const std::span<const std::byte> bytes = worker_link::receive();
  const stopwatch handing_on;
  members_.send_to_all(bytes);
  handing_on_seconds_ = handing_on.seconds();
  return bytes;
}

void node_leader::average(std::span<double> values) {
  value_sum sum;
  sum.add(values, 1);
  for (const message& each : members_.collect()) sum.add(each);
  average_over_clients(sum.values, sum.workers);
  members_.send_to_all(std::as_bytes(std::span(sum.values)));
  std::ranges::copy(sum.values, values.begin());
}

void node_leader::add_node(std::uint64_t step, const gradient_store& gradients, step_report& report) {
  const stopwatch summing;
  const double own_seconds = report.compute_seconds;
  for (const message& each : members_.collect()) {
    const std::string name = members_.name_of(each.sender);
    if (each.report.replica_hash != report.replica_hash) throw other_replica(name, step);
    // Here, where it is known whose it is: the sum of the node is NaN as well.
    if (!std::isfinite(each.report.loss))
      throw link_error(name + ": the loss is not finite in step " + std::to_string(step));
    report = merged(report, each.report);
    if (each.report.is_last) continue;
    const std::size_t expected = model_.elements() * sizeof(float);
    if (each.bytes.size() != expected) {
      throw link_error(name + " sent " + std::to_string(each.bytes.size()) + " bytes of gradients in step " +
                       std::to_string(step) + ", not " + std::to_string(expected));
    }
    const auto* next = reinterpret_cast<const float*>(each.bytes.data());
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      for (float& sum : gradients(l)) sum += *next++;
    }
  }
  // The wait for one that computes longer is the slowest worker's time, not the node's.
  const double waited_seconds = report.compute_seconds - own_seconds;
  report.node_seconds = handing_on_seconds_ + std::max(0.0, summing.seconds() - waited_seconds);
}

void node_leader::send_state(const std::vector<std::byte>& state) {
  std::vector<std::vector<std::byte>> states = {state};
  for (const message& each : members_.collect()) {
    for (auto& members : unpack(each.bytes)) states.push_back(std::move(members));
  }
  const std::vector<std::byte> packed = pack(states);
  const std::span<const std::byte> bytes = packed;
  send({}, {&bytes, 1});
}

std::vector<std::byte> node_leader::receive_state() {
  std::vector<std::vector<std::byte>> states = unpack(worker_link::receive());
  if (states.size() != 1 + members_.clients()) throw link_error("the server sent states of another node");
  for (std::size_t m = 0; m < members_.clients(); ++m) {
    members_.send(m, std::span<const std::byte>(pack({&states[m + 1], 1})));
  }
  return std::move(states[0]);
}

void work_as_member(worker_link& leader, replica& local, const worker_tasks& tasks,
                    const worker_options& options) {
  if (options.steps_done > 0) load_state(leader.receive_state(), nullptr, tasks);
  for (std::uint64_t step = options.steps_done + 1;; ++step) {
    pull(leader, local, step);
    if (tasks.pulled) tasks.pulled(step);
    step_report report = report_on_replica(local, step, tasks, options);
    if (report.is_last) return leader.send(report, {});

    const stopwatch compute;
    tasks.compute(step, report);
    report.compute_seconds = compute.seconds();

    // As they lie, and no frame: it would be hashed at both ends, for a way that mostly stays within a machine.
    std::vector<std::span<const std::byte>> gradients;
    for (std::size_t l = 0; l < local.model().layers(); ++l)
      gradients.push_back(std::as_bytes(local.gradient(l)));
    leader.send(report, gradients);
    if (is_checkpoint_due(options.checkpoint_period_steps, step, options.steps))
      leader.send_state(save_state(nullptr, tasks));
  }
}

}  // namespace resnet50_ps
