// SPDX-License-Identifier: MIT
// What does a step of a worker cost beside the addition that has to happen anyway?

#include <array>
#include <optional>

#include "lamina/lamina.hpp"
#include "model.hpp"
#include "ratios.hpp"

namespace {

using lamina_benchmark::layer_of;

const lamina::layout model = lamina_benchmark::read_model("resnet50");
// Two gradients, of which the first is used again only after the second: the caches are cold, as after a backward pass.
const std::array<std::vector<float>, 2> gradients = {lamina_benchmark::random_gradient(model, 1),
                                                     lamina_benchmark::random_gradient(model, 2)};

void plain_add(benchmark::State& state) {
  std::vector<float> sum(model.elements());
  std::size_t turn = 0;
  for (auto _ : state) {
    const std::vector<float>& gradient = gradients[turn++ % 2];
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const float* from = gradient.data() + model.offset(l);
      float* to = sum.data() + model.offset(l);
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
    const float* from = gradients[turn++ % 2].data();
    float* to = sum.data();
#pragma omp parallel for simd num_threads(threads)
    for (std::size_t i = 0; i < sum.size(); ++i) to[i] += from[i];
    benchmark::ClobberMemory();
  }
}

void accumulate(benchmark::State& state, lamina::finite_check check) {
  lamina::residual_accumulator<float> residual(model, {.check = check});
  for (std::size_t l = 0; l < model.layers(); ++l) residual.accumulate(l, layer_of(gradients[0], model, l));
  std::size_t turn = 0;
  for (auto _ : state) {
    const std::vector<float>& gradient = gradients[turn++ % 2];
    double values = 0;
    for (std::size_t l = 0; l < model.layers(); ++l)
      values += residual.accumulate(l, layer_of(gradient, model, l));
    benchmark::DoNotOptimize(values);
  }
}

// All layers in one call; the model in as many threads as the benchmark's argument says.
void accumulate_all(benchmark::State& state, lamina::finite_check check) {
  lamina::gradient_compressor<float> compressor(model, {.check = check});
  std::array<std::vector<std::span<const float>>, 2> layers;
  for (std::size_t k = 0; k < 2; ++k) {
    for (std::size_t l = 0; l < model.layers(); ++l) layers[k].push_back(layer_of(gradients[k], model, l));
  }
  const lamina::openmp threads{static_cast<int>(state.range(0))};
  compressor.accumulate_all(layers[0], threads);
  std::size_t turn = 0;
  for (auto _ : state) compressor.accumulate_all(layers[turn++ % 2], threads);
}

// The same with a model that the caches of two cores hold, so that memory sets no limit to the threads.
void accumulate_all_in_cache(benchmark::State& state) {
  std::vector<lamina::layer> layers;
  for (std::size_t l = 0; l < 16; ++l) layers.push_back({"layer" + std::to_string(l), {16384}});
  const lamina::layout small(std::move(layers));
  const std::vector<float> gradient = lamina_benchmark::random_gradient(small, 3);
  std::vector<std::span<const float>> spans;
  for (std::size_t l = 0; l < small.layers(); ++l) spans.push_back(layer_of(gradient, small, l));
  lamina::residual_accumulator<float> residual(small, {.check = lamina::finite_check::each_element});
  const lamina::openmp threads{static_cast<int>(state.range(0))};
  std::vector<double> values(small.layers());
  for (auto _ : state) {
    residual.accumulate_layers(
        0, small.layers(), [&](std::size_t l, const auto& visitor) { visitor(spans[l]); }, values,
        lamina::mean_abs{}, threads);
  }
}

void step(benchmark::State& state, lamina::finite_check check, double drop_ratio) {
  lamina::gradient_compressor<float> compressor(model, {.drop_ratio = drop_ratio, .check = check});
  std::size_t turn = 0;
  std::size_t sent_bytes = 0;
  for (auto _ : state) {
    const std::vector<float>& gradient = gradients[turn++ % 2];
    for (std::size_t l = 0; l < model.layers(); ++l) compressor.accumulate(l, layer_of(gradient, model, l));
    sent_bytes += compressor.encode().size_bytes();
    compressor.commit();
  }
  state.counters["sent_percent"] = 100.0 * static_cast<double>(sent_bytes) /
                                   static_cast<double>(state.iterations() * model.elements() * sizeof(float));
}

using enum lamina::finite_check;
BENCHMARK(plain_add)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(plain_add_in_threads)->DenseRange(1, 2)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(accumulate, whole_layer, whole_layer)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(accumulate, each_element, each_element)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(accumulate_all, whole_layer, whole_layer)
    ->DenseRange(1, 2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(accumulate_all, each_element, each_element)
    ->DenseRange(1, 2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(accumulate_all_in_cache)->DenseRange(1, 2)->UseRealTime()->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(step, each_element, each_element, 0.97)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace

int main(int argc, char** argv) {
  return lamina_benchmark::run(
      argc, argv,
      {
          {"accumulate, checked within the pass", "accumulate/each_element", "plain_add", 1.05},
          {"accumulate, layer checked first", "accumulate/whole_layer", "plain_add", 1.35},
          {"whole step at 5 % sent", "step/each_element", "plain_add", 1.10},
          {"one thread over two, plain", "plain_add_in_threads/1", "plain_add_in_threads/2", 1.8, true},
          {"one thread over two", "accumulate_all/each_element/1", "accumulate_all/each_element/2", 1.8,
           true},
          {"one thread over two, layers checked first", "accumulate_all/whole_layer/1",
           "accumulate_all/whole_layer/2", 1.8, true},
          {"one thread over two, in cache", "accumulate_all_in_cache/1", "accumulate_all_in_cache/2", 1.8,
           true},
      });
}
