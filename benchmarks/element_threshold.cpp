// SPDX-License-Identifier: MIT
// What does a threshold over layers cost compared with one over elements? All are searched in a residual that is there already,
// for 5 % to be sent: Algorithm 1 with and without the pass that takes the layers' values, an exact selection, a
// sample, a histogram, and two laws fitted.

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "baselines/method.hpp"
#include "baselines/thresholds.hpp"
#include "common/limits.hpp"
#include "common/model.hpp"
#include "lamina/representative.hpp"
#include "lamina/threshold.hpp"

namespace {

constexpr double sent = 0.05;

struct residual_of_model {
  explicit residual_of_model(lamina::layout given)
      : model(std::move(given)), elements(lamina_benchmark::gradient_of_step(model, 1)) {}

  void take_values() {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      values[l] = lamina::mean_abs{}(lamina_benchmark::layer_of(elements, model, l));
    }
  }

  lamina::layout model;
  std::vector<float> elements;
  std::vector<double> values = std::vector<double>(model.layers());
  std::vector<float> scratch = {};
};

// Made when a benchmark asks for it, and kept, since repetitions are interleaved.
residual_of_model& residual(const std::string& name) {
  static std::map<std::string, std::unique_ptr<residual_of_model>> made;
  std::unique_ptr<residual_of_model>& each = made[name];
  if (!each) {
    each =
        std::make_unique<residual_of_model>(name == "1e9" ? lamina_benchmark::equal_layers(1'000, 1'000'000)
                                                          : lamina_benchmark::read_model(name));
  }
  return *each;
}

void algorithm_1(benchmark::State& state, const std::string& name) {
  residual_of_model& of = residual(name);
  of.take_values();
  // Values that change from step to step, so that the branch predictor does not learn their order by heart.
  constexpr std::uint64_t steps = 256;
  std::vector<std::vector<double>> values(steps, of.values);
  for (std::uint64_t t = 0; t < steps; ++t) {
    for (std::uint64_t l = 0; l < of.values.size(); ++l) {
      values[t][l] *= 0.5 + static_cast<double>(lamina_benchmark::scrambled(t << 32U | l) % 1024) / 1024;
    }
  }
  lamina::threshold_search search;
  std::size_t t = 0;
  for (auto _ : state) benchmark::DoNotOptimize(search(values[t++ % steps], of.model.sizes(), 1 - sent));
}

void values_and_algorithm_1(benchmark::State& state, const std::string& name) {
  residual_of_model& of = residual(name);
  lamina::threshold_search search;
  double threshold = 0;
  for (auto _ : state) {
    of.take_values();
    threshold = search(of.values, of.model.sizes(), 1 - sent);
    benchmark::DoNotOptimize(threshold);
  }
  std::size_t kept = 0;
  for (std::size_t l = 0; l < of.model.layers(); ++l)
    kept += of.values[l] >= threshold ? of.model.sizes()[l] : 0;
  state.counters["kept_over_wanted"] =
      static_cast<double>(kept) / (sent * static_cast<double>(of.model.elements()));
}

using element_search = float (*)(std::span<const float>, std::size_t, std::vector<float>&);

// One threshold for the whole model: less work than one for each layer, and no layer's size in the way.
void over_elements(benchmark::State& state, element_search search, const std::string& name) {
  residual_of_model& of = residual(name);
  const std::size_t keep = lamina_baselines::share_of(of.elements.size(), sent);
  float threshold = 0;
  for (auto _ : state) {
    threshold = search(of.elements, keep, of.scratch);
    benchmark::DoNotOptimize(threshold);
  }
  state.counters["kept_over_wanted"] =
      static_cast<double>(lamina_baselines::count_at_or_above(of.elements, threshold)) /
      static_cast<double>(keep);
  if (name == "1e9") of.scratch = {};  // 4 GB
}

float histogram(std::span<const float> elements, std::size_t keep, std::vector<float>& /*scratch*/) {
  return lamina_baselines::histogram_threshold(elements, keep);
}
float gaussian(std::span<const float> elements, std::size_t keep, std::vector<float>& /*scratch*/) {
  return lamina_baselines::gaussian_threshold(elements, keep);
}

const bool registered = [] {
  std::vector<std::string> models = {"resnet50"};
  if (!lamina_benchmark::is_quick()) models.insert(models.end(), {"vgg16", "bert_base", "gpt2"});
  if (!lamina_benchmark::is_quick() && lamina_benchmark::has_memory_for(11)) models.emplace_back("1e9");
  const std::vector<std::pair<std::string, element_search>> searches = {
      {"exact", lamina_baselines::exact_threshold},
      {"sampled", lamina_baselines::sampled_threshold},
      {"histogram", histogram},
      {"gaussian", gaussian},
      {"exponential", lamina_baselines::exponential_threshold}};
  for (const std::string& model : models) {
    const auto add = [&](const std::string& name, auto&& function) {
      auto* each = benchmark::RegisterBenchmark((name + "/" + model).c_str(), function);
      each->Unit(benchmark::kMillisecond);
      if (model == "1e9") each->Iterations(1)->Repetitions(3);
    };
    add("algorithm_1", [model](benchmark::State& state) { algorithm_1(state, model); });
    add("values_and_algorithm_1", [model](benchmark::State& state) { values_and_algorithm_1(state, model); });
    for (const auto& [name, search] : searches) {
      add(name, [model, search = search](benchmark::State& state) { over_elements(state, search, model); });
    }
  }
  return true;
}();

}  // namespace
