// SPDX-License-Identifier: MIT
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "loops/server.hpp"

namespace resnet50_ps {
namespace {

// The gradients of a client in its step, checked to be that.
lamina::frame_view<float> decode_from(const pushed& arrived, const lamina::layout& model, std::uint64_t step,
                                      const std::string& name) {
  auto frame = read_from(name, [&] {
    auto gradients = lamina::decode<float>(arrived.bytes, model);
    lamina::expect(gradients, lamina::frame_kind::gradients, step);
    return gradients;
  });
  if (frame.sender() == arrived.sender) return frame;
  throw link_error(name + " sent the frame of another sender, " + std::to_string(frame.sender()));
}

}  // namespace

void serve_asynchronously(server_link& workers, const replica& local, const server_options& options,
                          const server_tasks& tasks) {
  const lamina::layout& model = local.model();
  const auto parameters = [&](std::size_t l) { return local[l]; };
  const std::size_t clients = workers.clients();
  const std::vector<std::size_t> workers_of = workers.workers_of_clients();
  const auto all_workers =
      static_cast<float>(std::accumulate(workers_of.begin(), workers_of.end(), std::size_t{0}));
  const auto out = std::make_shared<published_model>(
      published_model{local, lamina::parameter_publisher<float>(model, clients)});
  sgd optimizer(model, options.optimizer);
  std::vector<std::uint64_t> next_step(clients, 1);
  std::vector<std::uint64_t> answered_at(clients, 0);  // frames applied when the client last got parameters
  std::uint64_t applied = 0;
  step_log log(model, tasks.records, workers.clock());

  const auto answer = [&](std::size_t c) {
    const lamina::encoded_frame& frame = out->frames.encode(c, next_step[c], parameters);
    workers.send(c, message_kind::parameters, {frame.segments(), out});
    out->frames.commit(c);
    log.published(frame.size_bytes(), 1);
    answered_at[c] = applied;
  };
  for (std::size_t c = 0; c < clients; ++c) answer(c);

  for (std::size_t training = clients; training > 0;) {
    const message arrived = workers.receive_from_any();
    const std::size_t c = arrived.sender;
    if (arrived.kind == message_kind::values) {
      workers.answer_with_mean(arrived);
      continue;
    }
    const bool is_over = options.plan.is_over(next_step[c]);
    expect(arrived, is_over ? message_kind::finished : message_kind::gradients, workers.name_of(c));
    const pushed gradients = read_pushed(arrived);
    log.evaluated(gradients.report, next_step[c], clients);
    if (is_over) {
      --training;
      continue;
    }

    const auto frame = decode_from(gradients, model, next_step[c], workers.name_of(c));
    const std::uint64_t step = applied / clients + 1;
    optimizer.set_learning_rate(options.learning_rate.at(step));
    lamina::selection layers(model);
    std::vector<float> share;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (frame.is_dropped(l)) continue;
      layers.send(l);
      optimizer.begin(l, step);
      frame.for_each_block(l, [&](std::size_t begin, std::span<const float> gradient) {
        share.assign(gradient.begin(), gradient.end());
        for (float& each : share) each /= all_workers;
        optimizer.update(l, begin, share, parameters(l));
      });
    }
    out->frames.update(layers);
    log.applied(gradients, layers, applied - answered_at[c]);
    ++applied;
    ++next_step[c];
    if (applied % clients == 0) log.finish_step(step, optimizer.learning_rate());
    answer(c);
  }
}

}  // namespace resnet50_ps
