// SPDX-License-Identifier: MIT
#include "loops/server.hpp"

#include <algorithm>
#include <functional>
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <string>
#include <utility>
#include <vector>

namespace resnet50_ps {
namespace {

void resume(server_link& link, const server_state& state, sgd& optimizer) {
  std::ranges::copy(state.velocity, optimizer.velocity().begin());
  std::ranges::copy(state.updated_in, optimizer.updated_in().begin());
  std::span<const std::vector<std::byte>> states = state.workers;
  const std::vector<std::size_t> workers = link.workers_of_clients();
  for (std::size_t c = 0; c < link.clients(); ++c) {
    link.send(c, std::span<const std::byte>(pack(states.first(workers[c]))));
    states = states.subspan(workers[c]);
  }
}

server_state state_after(std::uint64_t step, const sgd& optimizer, const std::vector<message>& messages) {
  server_state state;
  state.step = step;
  state.velocity.assign(optimizer.velocity().begin(), optimizer.velocity().end());
  state.updated_in.assign(optimizer.updated_in().begin(), optimizer.updated_in().end());
  for (const message& each : messages) {
    for (auto& worker : unpack(each.bytes)) state.workers.push_back(std::move(worker));
  }
  return state;
}

}  // namespace

void take_reports(const std::vector<message>& messages, std::uint64_t step,
                  const std::function<std::uint64_t()>& expected_hash,
                  const std::function<std::string(std::size_t)>& name_of, evaluation_log& evaluations,
                  const server_tasks& tasks) {
  std::uint64_t expected = 0;
  for (const message& each : messages) {
    if (each.report.replica_hash == 0) continue;
    if (expected == 0) expected = expected_hash();
    if (each.report.replica_hash == expected) continue;
    throw other_replica(name_of(each.sender), step);
  }
  for (const message& each : messages) {
    const auto whole = evaluations.add(step - 1, each.report, messages.size());
    if (whole && tasks.record_evaluation) tasks.record_evaluation(step - 1, *whole);
  }
}

void serve(server_link& link, const lamina::layout& model, const parameter_store& parameters,
           const server_options& options, const server_tasks& tasks, server_state from) {
  auto aggregator = lamina::gradient_aggregator<float>::of_nodes(model, link.workers_of_clients(),
                                                                 {.first_step = from.step + 1});
  lamina::parameter_publisher<float> publisher(model, link.clients());
  sgd optimizer(model, options.optimizer);
  step_summary summary(model);
  evaluation_log evaluations;

  if (from.step > 0) resume(link, from, optimizer);
  from.workers.clear();
  for (std::uint64_t step = from.step + 1;; ++step) {
    const stopwatch encoding;
    const lamina::encoded_frame& published = publisher.encode_for_all(step, parameters);
    summary.add_server_seconds(encoding.seconds());
    link.send_to_all(published.segments());
    publisher.commit_all();
    summary.add_published(published.size_bytes(), link.clients_left());

    const std::vector<message> messages = link.receive_from_all();
    take_reports(
        messages, step, [&] { return hash_of(model, parameters); },
        [&](std::size_t client) { return link.name_of(client); }, evaluations, tasks);
    if (step > options.steps) return;

    const stopwatch updating;
    const float learning_rate = options.learning_rate.at(step);
    optimizer.set_learning_rate(learning_rate);
    for (const message& each : messages) {
      read_from(link.name_of(each.sender), [&] { aggregator.add(lamina::decode<float>(each.bytes, model)); });
      summary.add_report(each.report, each.bytes.size());
    }
    if (messages.size() < link.clients()) aggregator.close();  // without those that were lost
    for (std::size_t l = 0; l < model.layers(); ++l) {
      // Blocks of the mean go straight into the update; a layer that did not arrive has none and stays untouched.
      if (aggregator.arrived().is_sent(l)) optimizer.begin(l, step);
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> gradient) {
        optimizer.update(l, begin, gradient, parameters(l));
      });
    }
    publisher.update(aggregator.arrived());
    summary.add_arrived(aggregator.arrived());
    aggregator.next_step();
    updating.wait_for(options.least_update_seconds);
    summary.add_server_seconds(updating.seconds());
    const step_metrics metrics = summary.finish(step, learning_rate);
    if (tasks.record) tasks.record(metrics);
    if (is_checkpoint_due(options.checkpoint_period_steps, step, options.steps)) {
      const server_state state = state_after(step, optimizer, link.receive_from_all());
      if (tasks.save) tasks.save(state);
      summary.begin();
    }
  }
}

}  // namespace resnet50_ps
