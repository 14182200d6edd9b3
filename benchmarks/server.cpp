// SPDX-License-Identifier: MIT
// What does the server's pass cost for W workers: the mean of their frames and a step of SGD, beside the same over dense
// gradients?

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "common/limits.hpp"
#include "common/model.hpp"
#include "lamina/server.hpp"
#include "lamina/worker.hpp"

namespace {

const lamina::layout model = lamina_benchmark::read_model("resnet50");
constexpr float learning_rate = 0.01F;

// The gradients of W workers: their frames at 5 % and whole. Those of 64 workers take 7 GB, which all sizes share.
class senders {
 public:
  explicit senders(double drop_ratio) : drop_ratio_(drop_ratio) {}

  std::span<const std::vector<std::byte>> frames(std::size_t workers) {
    while (frames_.size() < workers) {
      const std::vector<float> gradient = lamina_benchmark::gradient_of_step(model, frames_.size() + 1);
      lamina::gradient_compressor<float> worker(
          model, {.drop_ratio = drop_ratio_, .sender = static_cast<std::uint32_t>(frames_.size())});
      for (std::size_t l = 0; l < model.layers(); ++l) {
        worker.accumulate(l, lamina_benchmark::layer_of(gradient, model, l));
      }
      frames_.push_back(worker.encode().to_bytes());
    }
    return std::span(frames_).first(workers);
  }

 private:
  double drop_ratio_;
  std::vector<std::vector<std::byte>> frames_;
};

senders some(0.95);
senders everything(0);

// Decoding included, since a server has to do it.
void aggregate(benchmark::State& state, senders& from) {
  const auto frames = from.frames(static_cast<std::size_t>(state.range(0)));
  std::vector<float> parameters(model.elements());
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, frames.size());
  for (auto _ : state) {
    state.PauseTiming();
    // Which waits for step 1, as the frames are.
    aggregator = lamina::gradient_aggregator<float>::of_workers(model, frames.size());
    state.ResumeTiming();
    for (const auto& bytes : frames) aggregator.add(lamina::decode<float>(bytes, model));
    for (std::size_t l = 0; l < model.layers(); ++l) {
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> mean) {
        float* to = parameters.data() + model.offset(l) + begin;
        for (std::size_t i = 0; i < mean.size(); ++i) to[i] -= learning_rate * mean[i];
      });
    }
    benchmark::ClobberMemory();
  }
}

// Block by block, so that the sum stays in cache: the best that a plain loop does.
void dense_sum(benchmark::State& state) {
  const auto frames = everything.frames(static_cast<std::size_t>(state.range(0)));
  std::vector<lamina::frame_view<float>> views;
  for (const auto& bytes : frames) views.push_back(lamina::decode<float>(bytes, model));
  std::vector<float> parameters(model.elements());
  std::vector<float> sum(4096);
  for (auto _ : state) {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      for (std::size_t begin = 0; begin < model.sizes()[l]; begin += sum.size()) {
        const std::size_t count = std::min(sum.size(), model.sizes()[l] - begin);
        std::copy_n(views[0].layer(l).data() + begin, count, sum.begin());
        for (std::size_t w = 1; w < views.size(); ++w) {
          const float* from = views[w].layer(l).data() + begin;
          for (std::size_t i = 0; i < count; ++i) sum[i] += from[i];
        }
        float* to = parameters.data() + model.offset(l) + begin;
        const float factor = learning_rate / static_cast<float>(views.size());
        for (std::size_t i = 0; i < count; ++i) to[i] -= factor * sum[i];
      }
    }
    benchmark::ClobberMemory();
  }
}

void workers(benchmark::internal::Benchmark* each) {
  const int most = lamina_benchmark::is_quick() ? 4 : lamina_benchmark::has_memory_for(8) ? 64 : 16;
  each->RangeMultiplier(4)->Range(1, most)->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(aggregate, some, some)->Apply(workers);
BENCHMARK_CAPTURE(aggregate, everything, everything)->Apply(workers);
BENCHMARK(dense_sum)->Apply(workers);

}  // namespace
