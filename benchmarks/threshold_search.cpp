// SPDX-License-Identifier: MIT
// What does Algorithm 1 cost, once the values of the layers are there?

#include <random>

#include "lamina/threshold.hpp"
#include "model.hpp"
#include "ratios.hpp"

namespace {

void search(benchmark::State& state) {
  const auto layers = static_cast<std::size_t>(state.range(0));
  // A window that moves along: of few values seen again and again the branch predictor learns the order by heart.
  constexpr std::size_t windows = 1 << 16;
  std::mt19937 random(1);
  std::vector<double> values(layers + windows);
  std::vector<std::size_t> sizes(layers + windows);
  for (std::size_t l = 0; l < values.size(); ++l) {
    values[l] = static_cast<double>(random()) / 4294967296.0;
    sizes[l] = 1 + random() % 100'000;
  }
  lamina::threshold_search search;
  std::size_t begin = 0;
  for (auto _ : state) {
    begin = (begin + layers) % windows;
    benchmark::DoNotOptimize(
        search(std::span(values).subspan(begin, layers), std::span(sizes).subspan(begin, layers), 0.95));
  }
}

BENCHMARK(search)->Arg(161)->RangeMultiplier(10)->Range(1000, 1'000'000)->Unit(benchmark::kMicrosecond);

}  // namespace

int main(int argc, char** argv) {
  return lamina_benchmark::run(
      argc, argv,
      {
          {"search of 100,000 layers over 10,000", "search/100000", "search/10000", 15},
          {"search of 1,000,000 layers over 100,000", "search/1000000", "search/100000", 15},
      });
}
