// SPDX-License-Identifier: MIT
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "loops/server.hpp"

namespace resnet50_ps {

void serve_asynchronously(server_link& link, const lamina::layout& model, const parameter_store& parameters,
                          const server_options& options, const server_tasks& tasks) {
  const std::size_t clients = link.clients();
  const std::vector<std::size_t> workers_of = link.workers_of_clients();
  const auto workers =
      static_cast<float>(std::accumulate(workers_of.begin(), workers_of.end(), std::size_t{0}));
  lamina::parameter_publisher<float> publisher(model, clients);
  sgd optimizer(model, options.optimizer);
  std::vector<std::uint64_t> next_step(clients, 1);
  std::vector<std::uint64_t> answered_at(clients, 0);  // frames applied when the client last got parameters
  std::uint64_t applied = 0;
  step_summary summary(model);
  evaluation_log evaluations;

  const auto answer = [&](std::size_t c) {
    const stopwatch encoding;
    const lamina::encoded_frame& frame = publisher.encode(c, next_step[c], parameters);
    summary.add_server_seconds(encoding.seconds());
    link.send(c, frame.segments());
    publisher.commit(c);
    summary.add_published(frame.size_bytes(), 1);
    answered_at[c] = applied;
  };
  for (std::size_t c = 0; c < clients; ++c) answer(c);

  for (std::size_t training = clients; training > 0;) {
    const message arrived = link.receive_from_any();
    const std::size_t c = arrived.sender;
    if (const auto whole = evaluations.add(next_step[c] - 1, arrived.report, clients);
        whole && tasks.record_evaluation) {
      tasks.record_evaluation(next_step[c] - 1, *whole);
    }
    if (next_step[c] > options.steps) {
      --training;
      continue;
    }
    const stopwatch updating;
    const auto frame = read_from(link.name_of(c), [&] {
      auto gradients = lamina::decode<float>(arrived.bytes, model);
      lamina::expect(gradients, lamina::frame_kind::gradients, next_step[c]);
      return gradients;
    });
    if (frame.sender() != c) {
      throw link_error(link.name_of(c) + " sent the frame of another sender, " +
                       std::to_string(frame.sender()));
    }
    const std::uint64_t step = applied / clients + 1;
    const float learning_rate = options.learning_rate.at(step);
    optimizer.set_learning_rate(learning_rate);
    lamina::selection layers(model);
    std::vector<float> share;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (frame.is_dropped(l)) continue;
      layers.send(l);
      optimizer.begin(l, step);
      frame.for_each_block(l, [&](std::size_t begin, std::span<const float> gradient) {
        share.assign(gradient.begin(), gradient.end());
        for (float& each : share) each /= workers;
        optimizer.update(l, begin, share, parameters(l));
      });
    }
    publisher.update(layers);
    // Others go on during an evaluation: it is part of the step's time.
    step_report report = arrived.report;
    report.evaluation_seconds = 0;
    summary.add_report(report, arrived.bytes.size(), applied - answered_at[c]);
    summary.add_arrived(layers);
    summary.add_server_seconds(updating.seconds());
    ++applied;
    ++next_step[c];
    if (applied % clients == 0) {
      const step_metrics metrics = summary.finish(step, learning_rate);
      if (tasks.record) tasks.record(metrics);
    }
    answer(c);
  }
}

}  // namespace resnet50_ps
