// SPDX-License-Identifier: MIT
// How does a step grow: with the number of elements, with that of layers, and with threads at each size? Compared with the plain
// addition of as many elements.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "common/limits.hpp"
#include "common/model.hpp"
#include "lamina/lamina.hpp"

namespace {

// Layers of at most a million elements, as a model of this size may have.
lamina::layout model_of(std::size_t elements) {
  const std::size_t largest = 1'000'000;
  return elements <= largest ? lamina_benchmark::equal_layers(1, elements)
                             : lamina_benchmark::equal_layers(elements / largest, largest);
}

void plain_add(benchmark::State& state, std::size_t count) {
  const std::vector<float> gradient = lamina_benchmark::gradient_of_step(model_of(count), 1);
  std::vector<float> sum(count);
  for (auto _ : state) {
    for (std::size_t i = 0; i < count; ++i) sum[i] += gradient[i];
    benchmark::ClobberMemory();
  }
}

void step(benchmark::State& state, const lamina::layout& model, std::size_t threads) {
  const std::vector<float> gradient = lamina_benchmark::gradient_of_step(model, 1);
  std::vector<std::span<const float>> layers;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    layers.push_back(lamina_benchmark::layer_of(gradient, model, l));
  }
  lamina::worker<float> worker(model, {.non_finite = lamina::non_finite::skip});
  // The first step takes the residual's pages from the system, which no later step does.
  (void)worker.add(layers, 1, lamina::openmp{static_cast<int>(threads)});
  for (auto _ : state) {
    auto step = worker.add(layers, 1, lamina::openmp{static_cast<int>(threads)});
    benchmark::DoNotOptimize(step.frame().size_bytes());
    step.commit();
  }
}

// The layers one by one, as a training loop's hooks do it.
void step_by_layer(benchmark::State& state, const lamina::layout& model) {
  const std::vector<float> gradient = lamina_benchmark::gradient_of_step(model, 1);
  lamina::worker<float> worker(model, {.non_finite = lamina::non_finite::skip});
  const auto one_step = [&] {
    auto step = worker.begin();
    for (std::size_t l = 0; l < model.layers(); ++l)
      step.add(l, lamina_benchmark::layer_of(gradient, model, l));
    benchmark::DoNotOptimize(step.frame().size_bytes());
    step.commit();
  };
  one_step();
  for (auto _ : state) one_step();
}

const bool registered = [] {
  const auto add = [](const std::string& name, auto function) {
    return benchmark::RegisterBenchmark(name.c_str(), function)->Unit(benchmark::kMicrosecond)->UseRealTime();
  };
  const std::size_t most = lamina_benchmark::is_quick()          ? 10'000'000
                           : lamina_benchmark::has_memory_for(8) ? 1'000'000'000
                                                                 : 100'000'000;
  for (std::size_t elements = 1'000; elements <= most; elements *= 10) {
    const std::string size = std::to_string(elements);
    const bool is_huge = elements == 1'000'000'000;  // 8 GB at a time
    auto* plain = add("plain_add/" + size, [=](benchmark::State& state) { plain_add(state, elements); });
    if (is_huge) plain->Iterations(1)->Repetitions(3);
    for (const std::size_t threads : {std::size_t{1}, std::size_t{2}}) {
      auto* each = add("step/" + size + "/threads:" + std::to_string(threads),
                       [=](benchmark::State& state) { step(state, model_of(elements), threads); });
      if (is_huge) each->Iterations(1)->Repetitions(3);
    }
  }
  add("many_layers/all_at_once",
      [](benchmark::State& state) { step(state, lamina_benchmark::equal_layers(100'000, 100), 1); });
  add("many_layers/one_by_one",
      [](benchmark::State& state) { step_by_layer(state, lamina_benchmark::equal_layers(100'000, 100)); });
  return true;
}();

}  // namespace
