// SPDX-License-Identifier: MIT
#include "node.hpp"

#include <algorithm>
#include <cmath>
#include <lamina/codec.hpp>
#include <string>
#include <utility>

#include "records/metrics.hpp"
#include "worker_step.hpp"

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
  members_.send_to_all(bytes);
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
  for (const message& each : members_.collect()) {
    const std::string name = members_.name_of(each.sender);
    if (each.report.replica_hash != report.replica_hash) throw other_replica(name, step);
    // Here, where it is known whose it is: the sum of the node is NaN as well.
    if (!std::isfinite(each.report.loss))
      throw link_error(name + ": the loss is not finite in step " + std::to_string(step));
    report = merged(report, each.report);
    if (each.report.is_last) continue;
    const auto frame = read_from(name, [&] {
      auto whole = lamina::decode<float>(each.bytes, model_);
      lamina::expect(whole, lamina::frame_kind::gradients, step);
      return whole;
    });
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      const std::span<float> sum = gradients(l);
      frame.for_each_block(l, [&](std::size_t begin, std::span<const float> block) {
        for (std::size_t i = 0; i < block.size(); ++i) sum[begin + i] += block[i];
      });
    }
  }
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
  lamina::frame_encoder<float> encoder(local.model());
  lamina::selection everything(local.model());
  for (std::size_t l = 0; l < local.model().layers(); ++l) everything.send(l);

  if (options.steps_done > 0) load_state(leader.receive_state(), nullptr, tasks);
  for (std::uint64_t step = options.steps_done + 1;; ++step) {
    pull(leader, local, step);
    if (tasks.pulled) tasks.pulled(step);
    step_report report = report_on_replica(local, step, tasks, options);
    if (report.is_last) return leader.send(report, {});

    const stopwatch compute;
    tasks.compute(step, report);
    const lamina::encoded_frame& frame =
        encoder.encode(lamina::frame_kind::gradients, step, 0, everything,
                       [&](std::size_t l) -> std::span<const float> { return local.gradient(l); });
    report.compute_seconds = compute.seconds();

    leader.send(report, frame.segments());
    if (is_checkpoint_due(options.checkpoint_period_steps, step, options.steps))
      leader.send_state(save_state(nullptr, tasks));
  }
}

}  // namespace resnet50_ps
