// SPDX-License-Identifier: MIT
#include <algorithm>
#include <array>
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <vector>

#include "server.hpp"

namespace resnet50_ps {
namespace {

// Calls `consume` with blocks of the layer's gradient over W.
template <class Consume>
void for_each_share(const lamina::frame_view<float>& frame, std::size_t layer, std::size_t elements,
                    std::size_t workers, Consume&& consume) {
  std::array<float, 4096> block;
  for (std::size_t begin = 0; begin < elements; begin += block.size()) {
    const std::span<float> share = std::span(block).first(std::min(block.size(), elements - begin));
    frame.copy(layer, begin, share);
    for (float& each : share) each /= static_cast<float>(workers);
    consume(begin, std::span<const float>(share));
  }
}

}  // namespace

void serve_asynchronously(server_link& link, const lamina::layout& model, const parameter_store& parameters,
                          const server_options& options, const server_tasks& tasks) {
  const std::size_t workers = link.workers();
  lamina::parameter_publisher<float> publisher(model, workers);
  sgd optimizer(model, options.optimizer);
  std::vector<std::uint64_t> next_step(workers, 1);
  std::vector<std::uint64_t> answered_at(workers, 0);  // frames applied when the worker last got parameters
  std::uint64_t applied = 0;
  step_summary summary(model);
  evaluation_log evaluations(workers);

  const auto answer = [&](std::size_t w) {
    const stopwatch encoding;
    const lamina::encoded_frame& frame = publisher.encode(w, next_step[w], parameters);
    summary.add_server_seconds(encoding.seconds());
    link.send(w, frame.segments());
    publisher.commit(w);
    summary.add_published(frame.size_bytes(), 1);
    answered_at[w] = applied;
  };
  for (std::size_t w = 0; w < workers; ++w) answer(w);

  for (std::size_t training = workers; training > 0;) {
    const message arrived = link.receive_from_any();
    const std::size_t w = arrived.worker;
    if (const auto whole = evaluations.add(next_step[w] - 1, arrived.report);
        whole && tasks.record_evaluation) {
      tasks.record_evaluation(next_step[w] - 1, *whole);
    }
    if (next_step[w] > options.steps) {
      --training;
      continue;
    }
    const stopwatch updating;
    const auto frame = lamina::decode<float>(arrived.bytes, model);
    lamina::expect(frame, lamina::frame_kind::gradients, next_step[w]);
    if (frame.sender() != w) {
      throw link_error("worker " + std::to_string(w) + " sent the frame of worker " +
                       std::to_string(frame.sender()));
    }
    const std::uint64_t step = applied / workers + 1;
    const float learning_rate = options.learning_rate.at(step);
    optimizer.set_learning_rate(learning_rate);
    lamina::selection layers(model);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (frame.is_dropped(l)) continue;
      layers.send(l);
      for_each_share(frame, l, model.sizes()[l], workers,
                     [&](std::size_t begin, std::span<const float> gradient) {
                       optimizer.update(l, begin, gradient, parameters(l));
                     });
    }
    publisher.update(layers);
    summary.add_frame(arrived, applied - answered_at[w]);
    summary.add_arrived(layers);
    summary.add_server_seconds(updating.seconds());
    ++applied;
    ++next_step[w];
    if (applied % workers == 0) {
      const step_metrics metrics = summary.finish(step, learning_rate);
      if (tasks.record) tasks.record(metrics);
    }
    answer(w);
  }
}

}  // namespace resnet50_ps
