// SPDX-License-Identifier: MIT
#include "server.hpp"

#include <algorithm>
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <string>
#include <vector>

namespace resnet50_ps {
namespace {

// Each worker that hashed its replica must have what the server has.
void check_replicas(const std::vector<message>& messages, const lamina::layout& model,
                    const parameter_store& parameters, std::uint64_t step) {
  std::uint64_t expected = 0;
  for (const message& each : messages) {
    if (each.report.replica_hash == 0) continue;
    if (expected == 0) expected = hash_of(model, parameters);
    if (each.report.replica_hash == expected) continue;
    throw link_error("worker " + std::to_string(each.worker) + " began step " + std::to_string(step) +
                     " with other parameters than the server's");
  }
}

void resume(server_link& link, const server_state& state, sgd& optimizer) {
  if (state.workers.size() != link.workers()) {
    throw link_error("the checkpoint is of " + std::to_string(state.workers.size()) + " workers, not of " +
                     std::to_string(link.workers()));
  }
  std::ranges::copy(state.velocity, optimizer.velocity().begin());
  for (std::size_t w = 0; w < link.workers(); ++w) {
    const std::span<const std::byte> bytes = state.workers[w];
    link.send(w, std::span(&bytes, 1));
  }
}

server_state state_after(std::uint64_t step, const sgd& optimizer, const std::vector<message>& messages) {
  server_state state;
  state.step = step;
  state.velocity.assign(optimizer.velocity().begin(), optimizer.velocity().end());
  for (const message& each : messages) state.workers.emplace_back(each.bytes.begin(), each.bytes.end());
  return state;
}

}  // namespace

void serve(server_link& link, const lamina::layout& model, const parameter_store& parameters,
           const server_options& options, const server_tasks& tasks) {
  const std::uint64_t steps_done = options.resume ? options.resume->step : 0;
  lamina::gradient_aggregator<float> aggregator(model, link.workers(), steps_done + 1);
  lamina::parameter_publisher<float> publisher(model, link.workers());
  sgd optimizer(model, options.optimizer);

  step_summary summary(model);
  evaluation_log evaluations(link.workers());

  if (options.resume) resume(link, *options.resume, optimizer);
  for (std::uint64_t step = steps_done + 1;; ++step) {
    const stopwatch encoding;
    const lamina::encoded_frame& published = publisher.encode_for_all(step, parameters);
    summary.add_server_seconds(encoding.seconds());
    link.send_to_all(published.segments());
    publisher.commit_all();
    summary.add_published(published.size_bytes(), link.workers());

    const std::vector<message> messages = link.receive_from_all();
    check_replicas(messages, model, parameters, step);
    for (const message& each : messages) {
      const auto whole = evaluations.add(step - 1, each.report);
      if (whole && tasks.record_evaluation) tasks.record_evaluation(step - 1, *whole);
    }
    if (step > options.steps) return;

    const stopwatch updating;
    const float learning_rate = options.learning_rate.at(step);
    optimizer.set_learning_rate(learning_rate);
    for (const message& each : messages) {
      aggregator.add(lamina::decode<float>(each.bytes, model));
      summary.add_frame(each);
    }
    for (std::size_t l = 0; l < model.layers(); ++l) {
      // Blocks of the mean go straight into the update; a layer that did not arrive has none and stays untouched.
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> gradient) {
        optimizer.update(l, begin, gradient, parameters(l));
      });
    }
    publisher.update(aggregator.arrived());
    summary.add_arrived(aggregator.arrived());
    aggregator.next_step();
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
