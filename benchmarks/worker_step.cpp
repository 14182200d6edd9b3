// SPDX-License-Identifier: MIT
// What does a step of a worker cost compared with the addition that has to happen anyway?

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "baselines/power_sgd.hpp"
#include "common/method_steps.hpp"
#include "common/model.hpp"
#include "lamina/lamina.hpp"
#include "lamina/local/local.hpp"

namespace {

using lamina_benchmark::layer_of;

const lamina::layout model = lamina_benchmark::read_model("resnet50");
const std::vector<std::vector<float>> gradients = lamina_benchmark::gradients_in_turn(model);

void plain_add(benchmark::State& state) {
  std::vector<float> sum(model.elements());
  std::size_t turn = 0;
  for (auto _ : state) {
    const std::vector<float>& gradient = gradients[turn++ % gradients.size()];
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const float* from = gradient.data() + model.offset(l);
      float* to = sum.data() + model.offset(l);
#pragma omp simd  // at -O2, too: the measure is the same for all
      for (std::size_t i = 0; i < model.sizes()[l]; ++i) to[i] += from[i];
    }
    benchmark::ClobberMemory();
  }
}

// The same in threads, each of which has a share of the elements: what the memory of the machine lets two threads win.
void plain_add_in_threads(benchmark::State& state) {
  std::vector<float> sum(model.elements());
  const int threads = static_cast<int>(state.range(0));
  std::size_t turn = 0;
  for (auto _ : state) {
    const float* from = gradients[turn++ % gradients.size()].data();
    float* to = sum.data();
#pragma omp parallel for simd num_threads(threads)
    for (std::size_t i = 0; i < sum.size(); ++i) to[i] += from[i];
    benchmark::ClobberMemory();
  }
}

// With momentum correction: two sums of an element in place of one.
void plain_momentum(benchmark::State& state) {
  std::vector<float> sum(model.elements());
  std::vector<float> velocity(model.elements());
  std::size_t turn = 0;
  for (auto _ : state) {
    const float* from = gradients[turn++ % gradients.size()].data();
    float* to = sum.data();
    float* u = velocity.data();
#pragma omp simd
    for (std::size_t i = 0; i < sum.size(); ++i) {
      u[i] = 0.9F * u[i] + from[i];
      to[i] += u[i];
    }
    benchmark::ClobberMemory();
  }
}

template <class Gradient, class Functor = lamina::mean_abs>
double add_to(lamina::residual_accumulator<float>& residual, std::size_t layer, const Gradient& gradient,
              const Functor& functor = {}) {
  double value = 0;
  const std::span<const typename Gradient::value_type> elements = gradient;
  const auto refused = residual.accumulate(
      layer, layer + 1, [&](std::size_t, const auto& visitor) { visitor(elements); }, std::span(&value, 1),
      functor);
  benchmark::DoNotOptimize(refused);
  return value;
}

template <class Functor = lamina::mean_abs>
void accumulate(benchmark::State& state, const lamina::worker_options& options) {
  lamina::residual_accumulator<float> residual(model, options);
  for (std::size_t l = 0; l < model.layers(); ++l) add_to(residual, l, layer_of(gradients[0], model, l));
  std::size_t turn = 0;
  for (auto _ : state) {
    const std::vector<float>& gradient = gradients[turn++ % gradients.size()];
    double values = 0;
    residual.begin_step();
    for (std::size_t l = 0; l < model.layers(); ++l)
      values += add_to(residual, l, layer_of(gradient, model, l), Functor());
    benchmark::DoNotOptimize(values);
  }
}

// Of a functor that does not tell the sum of the magnitudes.
void accumulate_max_abs(benchmark::State& state) {
  accumulate<lamina::max_abs>(state, {});
}

// Of gradients of half the width.
template <class Half>
void accumulate_half(benchmark::State& state) {
  static const std::vector<std::vector<Half>> halves = lamina_benchmark::gradients_in_turn<Half>(model);
  lamina::residual_accumulator<float> residual(model);
  for (std::size_t l = 0; l < model.layers(); ++l) add_to(residual, l, layer_of(halves[0], model, l));
  std::size_t turn = 0;
  for (auto _ : state) {
    const std::vector<Half>& gradient = halves[turn++ % halves.size()];
    double values = 0;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      values += add_to(residual, l, std::span<const Half>(layer_of(gradient, model, l)));
    }
    benchmark::DoNotOptimize(values);
  }
}

// Into a residual that was sent in the step before: written, not read.
void assign(benchmark::State& state) {
  lamina::residual_accumulator<float> residual(model, {});
  for (std::size_t l = 0; l < model.layers(); ++l) add_to(residual, l, layer_of(gradients[0], model, l));
  std::size_t turn = 0;
  for (auto _ : state) {
    const std::vector<float>& gradient = gradients[turn++ % gradients.size()];
    for (std::size_t l = 0; l < model.layers(); ++l) {
      residual.clear(l);
      benchmark::DoNotOptimize(add_to(residual, l, layer_of(gradient, model, l)));
    }
  }
}

std::vector<std::vector<std::span<const float>>> layers_of_gradients() {
  std::vector<std::vector<std::span<const float>>> layers(gradients.size());
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    for (std::size_t l = 0; l < model.layers(); ++l) layers[k].push_back(layer_of(gradients[k], model, l));
  }
  return layers;
}

// All layers in one call; the model in as many threads as the benchmark's argument says.
void accumulate_all(benchmark::State& state) {
  lamina::worker<float> worker(model);
  const std::vector<std::vector<std::span<const float>>> layers = layers_of_gradients();
  const lamina::openmp threads{static_cast<int>(state.range(0))};
  auto step = worker.add(layers[0], 1, threads);
  std::size_t turn = 0;
  for (auto _ : state) step.add(layers[turn++ % layers.size()], 1, threads);
}

// The same with a model that the caches of two cores hold, so that memory sets no limit to the threads.
void accumulate_all_in_cache(benchmark::State& state) {
  const lamina::layout small = lamina_benchmark::equal_layers(16, 16384);
  const std::vector<float> gradient = lamina_benchmark::gradient_of_step(small, 3);
  std::vector<std::span<const float>> spans;
  for (std::size_t l = 0; l < small.layers(); ++l) spans.push_back(layer_of(gradient, small, l));
  lamina::residual_accumulator<float> residual(small);
  const lamina::openmp threads{static_cast<int>(state.range(0))};
  std::vector<double> values(small.layers());
  for (auto _ : state) {
    residual.accumulate(
        0, small.layers(), [&](std::size_t l, const auto& visitor) { visitor(spans[l]); }, values,
        lamina::mean_abs{}, threads);
  }
}

// What a user gets who sets nothing but R, so that about 5 % are sent.
void default_step(benchmark::State& state) {
  lamina::worker<float> worker(model, {.drop_ratio = 0.97});
  const std::vector<std::vector<std::span<const float>>> layers = layers_of_gradients();
  const auto one_step = [&](const std::vector<std::span<const float>>& gradient) {
    auto step = worker.add(gradient);
    const std::size_t sent_bytes = step.frame().size_bytes();
    step.commit();
    return sent_bytes;
  };
  one_step(layers[1]);  // takes the residual's pages from the system, which no later step does
  std::size_t turn = 0;
  std::size_t sent_bytes = 0;
  for (auto _ : state) sent_bytes += one_step(layers[turn++ % layers.size()]);
  state.counters["sent_percent"] = 100.0 * static_cast<double>(sent_bytes) /
                                   static_cast<double>(state.iterations() * model.elements() * sizeof(float));
}

// Of the rank that the argument says: what others send in place of layers.
void power_sgd(benchmark::State& state) {
  lamina_baselines::power_sgd worker(model, static_cast<std::size_t>(state.range(0)));
  lamina_benchmark::time_steps(state, model, worker, gradients);
}

// The local delta of local updates: x and y are read, nothing is written.
void observe(benchmark::State& state) {
  lamina::local_delta<float> compressor(model);
  const std::vector<float> shared(model.elements(), 0.01F);
  std::vector<std::span<const float>> x;
  std::vector<std::vector<std::span<const float>>> y(gradients.size());
  for (std::size_t l = 0; l < model.layers(); ++l) {
    x.push_back(layer_of(shared, model, l));
    for (std::size_t k = 0; k < gradients.size(); ++k) y[k].push_back(layer_of(gradients[k], model, l));
  }
  std::size_t turn = 0;
  for (auto _ : state) benchmark::DoNotOptimize(compressor.observe_all(x, y[turn++ % y.size()]).data());
}

BENCHMARK(plain_add)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(plain_add_in_threads)->DenseRange(1, 2)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(plain_momentum)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(accumulate, refuse, {})->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(accumulate, skip, {.non_finite = lamina::non_finite::skip})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(accumulate, momentum, {.momentum = 0.9})->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(accumulate_max_abs)->Name("accumulate/max_abs")->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_TEMPLATE(accumulate_half, lamina::float16)
    ->Name("accumulate_float16")
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_TEMPLATE(accumulate_half, lamina::bfloat16)
    ->Name("accumulate_bfloat16")
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(assign)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(accumulate_all)->DenseRange(1, 2)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(accumulate_all_in_cache)->DenseRange(1, 2)->UseRealTime()->Unit(benchmark::kMicrosecond);
BENCHMARK(observe)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(default_step)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(power_sgd)->RangeMultiplier(2)->Range(1, 8)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
