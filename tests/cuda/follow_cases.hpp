// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstddef>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device_support.hpp"
#include "lamina/cuda/worker.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

/// A device and the CPU through the same steps.
namespace lamina_test {

/// Values, threshold, frame and residual of a device and of the CPU, over steps some of whose frames are lost.
template <class T, class G, class F = lamina::mean_abs, class Execution>
void follows_the_cpu(
    const Execution& execution, const std::vector<std::size_t>& sizes, lamina::worker_options options,
    std::size_t steps, std::size_t skipped = 0,
    const std::function<void(std::size_t step, std::size_t layer, std::vector<G>&)>& change = {}) {
  const lamina::layout model = model_of(sizes);
  options.sender = 3;
  options.run = 5;
  host_worker<T, F> cpu(model, options);
  lamina::cuda::worker<T, F> device(model, options);
  device_gradients<G> gradients(model, skipped);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  std::mt19937 random(7);
  for (std::size_t step = 1; step <= steps; ++step) {
    const std::string where = "in step " + std::to_string(step);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      auto gradient =
          random_gradient<G>(random, sizes[l], std::ldexp(1.0F, static_cast<int>(below(random, 6))));
      if (change) change(step, l, gradient);
      cpu.add(l, gradient);
      gradients.set(l, gradient);
    }
    device.add(execution);
    device.select(execution);
    execution.wait();
    require_same_values(cpu, device, where);
    require_same_frame(cpu, device, execution, buffer, where);
    if (step % 4 == 3) continue;  // this frame was lost
    cpu.commit();
    device.commit(execution);
    require_same_residuals(cpu, device, execution, where);
  }
}

/// With every option, by name.
template <class T>
std::vector<std::pair<std::string, lamina::worker_options>> all_options() {
  using options = lamina::worker_options;
  std::vector<std::pair<std::string, options>> all;
  const auto add = [&](const std::string& name, const auto& set) {
    options each{.drop_ratio = 0.7};
    set(each);
    all.emplace_back(name, each);
  };
  add("drop ratio 0.7", [](options&) {});
  add("drop ratio 0", [](options& o) { o.drop_ratio = 0; });
  add("drop ratio 1", [](options& o) { o.drop_ratio = 1; });
  add("search every 3 steps", [](options& o) { o.search_every = 3; });
  add("a fixed threshold", [](options& o) { o.threshold = 8; });
  add("warm-up", [](options& o) { o.drop_ratio = 0.99, o.warm_up_steps = 5; });
  add("warm-up, search every 100 steps",
      [](options& o) { o.drop_ratio = 0.99, o.warm_up_steps = 5, o.search_every = 100; });
  add("by score", [](options& o) { o.by_score = true; });
  add("by score, a budget of 20 %", [](options& o) { o.by_score = true, o.send_budget = 0.2; });
  add("by score, a fixed threshold", [](options& o) { o.by_score = true, o.threshold = 20; });
  add("a budget of 20 %", [](options& o) { o.send_budget = 0.2; });
  add("a budget of 1 %", [](options& o) { o.send_budget = 0.01; });
  add("at least every 2 steps", [](options& o) { o.drop_ratio = 0.95, o.at_least_every = 2; });
  add("a budget, at least every 2 steps, which overdraws it",
      [](options& o) { o.send_budget = 0.01, o.at_least_every = 2; });
  add("fragments of 4,096", [](options& o) { o.fragment_elements = 4096; });
  add("momentum", [](options& o) { o.momentum = 0.9; });
  add("payload float16", [](options& o) { o.payload = lamina::payload_type::float16; });
  add("payload bfloat16", [](options& o) { o.payload = lamina::payload_type::bfloat16; });
  add("payload int8 and momentum",
      [](options& o) { o.payload = lamina::payload_type::int8, o.momentum = 0.5; });
  add("payload int4", [](options& o) { o.payload = lamina::payload_type::int4; });
  return all;
}

}  // namespace lamina_test
