// SPDX-License-Identifier: MIT
#include "server.hpp"

#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <vector>

namespace resnet50_ps {

void serve(transport& link, const lamina::layout& model, const parameter_store& parameters,
           const server_options& options, const std::function<void(const step_metrics&)>& record) {
  lamina::gradient_aggregator<float> aggregator(model, link.workers());
  lamina::parameter_publisher<float> publisher(model, link.workers());
  sgd optimizer(model, options.optimizer);

  const lamina::encoded_frame* frame = &publisher.encode_for_all(1, parameters);
  for (std::uint64_t step = 1; step <= options.steps; ++step) {
    const stopwatch whole_step;
    link.send_to_workers(*frame);
    publisher.commit_all();
    const std::vector<message> messages = link.receive_from_workers();

    const stopwatch server_compute;
    for (const message& each : messages) aggregator.add(lamina::decode<float>(each.frame, model));
    for (std::size_t l = 0; l < model.layers(); ++l) {
      // Blocks of the mean go straight into the update; a layer that did not arrive has none and stays
      // untouched.
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> gradient) {
        optimizer.update(l, begin, gradient, parameters(l));
      });
    }
    publisher.update(aggregator.arrived());
    aggregator.next_step();
    frame = &publisher.encode_for_all(step + 1, parameters);

    record(summarize(step, messages, frame->size_bytes(), model, server_compute.seconds(),
                     whole_step.seconds()));
  }
  link.send_to_workers(*frame);
}

}  // namespace resnet50_ps
