// SPDX-License-Identifier: MIT
#pragma once

#include <benchmark/benchmark.h>

#include <cstddef>
#include <span>
#include <vector>

#include "../baselines/method.hpp"
#include "lamina/layout.hpp"

namespace lamina_benchmark {

/// Of a step: the bytes sent and the bytes of memory that the arithmetic needs.
inline void set_counters(benchmark::State& state, const lamina::layout& model, double sent_bytes,
                         double touched_bytes, double entropy_bytes = 0) {
  const auto elements = static_cast<double>(model.elements());
  if (entropy_bytes > 0) state.counters["entropy_percent"] = 100 * entropy_bytes / (elements * sizeof(float));
  state.counters["sent_percent"] = 100 * sent_bytes / (elements * sizeof(float));
  state.counters["touched_bytes_per_element"] = touched_bytes / elements;
}

/// Steps of a worker with these gradients, in turn.
inline void time_steps(benchmark::State& state, const lamina::layout& model, lamina_baselines::method& worker,
                       std::span<const std::vector<float>> gradients) {
  std::size_t turn = 0;
  double sent = 0;
  double touched = 0;
  worker.step(gradients[1]);  // takes pages from the system, which no later step does
  for (auto _ : state) {
    worker.step(gradients[turn++ % gradients.size()]);
    sent += static_cast<double>(worker.message_bytes());
    touched += static_cast<double>(worker.bytes_touched());
  }
  const auto steps = static_cast<double>(state.iterations());
  set_counters(state, model, sent / steps, touched / steps);
}

}  // namespace lamina_benchmark
