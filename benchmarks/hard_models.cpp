// SPDX-License-Identifier: MIT
// Where do layers lose? Models in which they say little: a single layer, one layer with most of the elements, and small
// models whose layers are alike. Nothing is timed: 5 % are to be sent for some steps, and what is sent and what the receiver
// then has is the same on every machine.

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "baselines/block_sparse.hpp"
#include "baselines/top_k.hpp"
#include "common/lamina_method.hpp"
#include "common/limits.hpp"
#include "common/model.hpp"

namespace {

using lamina_baselines::method;

constexpr double share = 0.05;
const std::uint64_t steps = lamina_benchmark::is_quick() ? 8 : 64;

struct hard_model {
  std::string name;
  lamina::layout model;
  std::uint64_t octaves;  // by which the scales of layers differ
};

lamina::layout one_dominates() {
  std::vector<lamina::layer> layers = {{"huge", {740'000}}};
  for (int l = 0; l < 26; ++l) layers.push_back({"small" + std::to_string(l), {10'000}});
  return lamina::layout(std::move(layers));
}

void quality(benchmark::State& state, const hard_model& of,
             const std::function<std::unique_ptr<method>(const lamina::layout&)>& make) {
  double sent = 0;
  double error = 0;
  double norm = 0;
  for (auto _ : state) {
    const std::unique_ptr<method> worker = make(of.model);
    std::vector<float> gradient(of.model.elements());
    std::vector<float> received(of.model.elements());
    std::vector<double> sum(of.model.elements());
    for (std::uint64_t t = 1; t <= steps; ++t) {
      lamina_benchmark::write_gradient(of.model, t, gradient, of.octaves);
      worker->step(gradient);
      worker->receive(received);
      sent += static_cast<double>(worker->message_bytes());
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i];
    }
    for (std::size_t i = 0; i < sum.size(); ++i) {
      error += (sum[i] - received[i]) * (sum[i] - received[i]);
      norm += sum[i] * sum[i];
    }
  }
  const double everything = static_cast<double>(steps * of.model.elements() * sizeof(float));
  state.counters["sent_percent"] = 100 * sent / everything;
  state.counters["steps"] = static_cast<double>(steps);
  state.counters["relative_error"] = std::sqrt(error / norm);
}

const bool registered = [] {
  static const std::vector<hard_model> models = {
      {"one_layer", lamina_benchmark::equal_layers(1, 1'000'000), 1},
      {"one_of_74_percent", one_dominates(), 8},
      {"20_alike", lamina_benchmark::equal_layers(20, 5'000), 1},
      {"161_alike", lamina_benchmark::equal_layers(161, 5'000), 1},
      {"161_of_eight_octaves", lamina_benchmark::equal_layers(161, 5'000), 8}};
  using maker = std::function<std::unique_ptr<method>(const lamina::layout&)>;
  static const std::vector<std::pair<std::string, maker>> methods = {
      {"lamina",
       [](const auto& model) { return std::make_unique<lamina_benchmark::lamina_method>(model, share, 0); }},
      {"lamina_fragments",
       [](const auto& model) {
         return std::make_unique<lamina_benchmark::lamina_method>(model, share, 4'096);
       }},
      {"block_sparse",
       [](const auto& model) { return std::make_unique<lamina_baselines::block_sparse>(model, share); }},
      {"top_k", [](const auto& model) { return std::make_unique<lamina_baselines::top_k>(model, share); }}};
  for (const hard_model& of : models) {
    for (const auto& [name, make] : methods) {
      benchmark::RegisterBenchmark((of.name + "/" + name).c_str(),
                                   [&of, &make = make](benchmark::State& state) { quality(state, of, make); })
          ->Unit(benchmark::kMillisecond)
          ->Iterations(1)
          ->Repetitions(1);
    }
  }
  return true;
}();

}  // namespace
