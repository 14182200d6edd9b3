// SPDX-License-Identifier: MIT
// What does Algorithm 1 cost, once the values of the layers are there? By selection, as lamina does it, and by sorting
// all layers, as the paper does.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "common/model.hpp"
#include "lamina/threshold.hpp"

namespace {

// A window that moves along many values: of few, seen again and again, the branch predictor learns the order by heart.
class moving_window {
 public:
  explicit moving_window(std::size_t layers)
      : layers_(layers), values_(layers + windows), sizes_(layers + windows) {
    for (std::size_t l = 0; l < values_.size(); ++l) {
      values_[l] = static_cast<double>(lamina_benchmark::scrambled(l) >> 11U);
      sizes_[l] = 1 + lamina_benchmark::scrambled(~l) % 100'000;
    }
  }

  void move() { begin_ = (begin_ + layers_) % windows; }
  std::span<const double> values() const { return std::span(values_).subspan(begin_, layers_); }
  std::span<const std::size_t> sizes() const { return std::span(sizes_).subspan(begin_, layers_); }

 private:
  static constexpr std::size_t windows = 1 << 16;
  std::size_t layers_;
  std::vector<double> values_;
  std::vector<std::size_t> sizes_;
  std::size_t begin_ = 0;
};

constexpr double drop_ratio = 0.95;

void search(benchmark::State& state) {
  moving_window window(static_cast<std::size_t>(state.range(0)));
  lamina::threshold_search search;
  benchmark::DoNotOptimize(
      search(window.values(), window.sizes(), drop_ratio));  // takes its memory, which it keeps
  for (auto _ : state) {
    window.move();
    benchmark::DoNotOptimize(search(window.values(), window.sizes(), drop_ratio));
  }
}

// The paper's words: sort the layers, add up their sizes until the sum is greater than R·N.
void sort(benchmark::State& state) {
  moving_window window(static_cast<std::size_t>(state.range(0)));
  std::vector<std::size_t> order(window.values().size());
  for (auto _ : state) {
    window.move();
    const auto values = window.values();
    const auto sizes = window.sizes();
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {}, [&](std::size_t l) { return values[l]; });
    const auto elements = static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}));
    double sum = 0;
    double threshold = lamina::invalid_threshold;
    for (const std::size_t l : order) {
      sum += static_cast<double>(sizes[l]);
      if (sum > drop_ratio * elements) {
        threshold = values[l];
        break;
      }
    }
    benchmark::DoNotOptimize(threshold);
  }
}

void layers(benchmark::internal::Benchmark* each) {
  each->Arg(161)->RangeMultiplier(10)->Range(10, 1'000'000)->Unit(benchmark::kMicrosecond);
}

BENCHMARK(search)->Apply(layers);
BENCHMARK(sort)->Apply(layers);

}  // namespace
