// SPDX-License-Identifier: MIT
// What does the server's pass cost for W workers: the mean of their frames and a step of SGD, compared with the same over dense
// gradients? Each step finds its frames and the parameters in memory and not in the caches; the workers' choices differ as in training.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "common/in_turn.hpp"
#include "common/limits.hpp"
#include "common/model.hpp"
#include "common/senders.hpp"
#include "lamina/server.hpp"

namespace {

using lamina_benchmark::frames_of_step;
using lamina_benchmark::senders;

const lamina::layout model = lamina_benchmark::read_model("resnet50");
constexpr float learning_rate = 0.01F;

// Whole frames take 7 GB, of which 64 workers need nearly all and the other sizes a part; with large caches the sparse ones take 2 GB more.
senders some(model, 0.95);
senders everything(model, 0);

// Where the parameters lie of what is updated.
lamina_benchmark::numbers_in_turn parameters(model.elements());

void set_counters(benchmark::State& state, const std::vector<frames_of_step>& steps) {
  double each = 0;
  double together = 0;
  std::size_t bytes = 0;
  for (const frames_of_step& step : steps) {
    each += step.each_sends;
    together += step.together_send;
    bytes += senders::bytes_of(step);
  }
  const auto count = static_cast<double>(steps.size());
  state.counters["sent_percent"] = 100 * each / count;
  state.counters["union_percent"] = 100 * together / count;
  state.counters["frames_bytes"] = static_cast<double>(bytes);  // of all that take turns
  state.counters["sets"] = count;
}

// Decoding included, since a server has to do it.
void aggregate(benchmark::State& state, senders& from) {
  const auto workers = static_cast<std::size_t>(state.range(0));
  const std::vector<frames_of_step> steps = from.in_turn(workers);
  std::size_t turn = 0;
  for (auto _ : state) {
    state.PauseTiming();
    // Which waits for step 1, as the frames are.
    lamina::server<float> server(model, {.workers = workers});
    state.ResumeTiming();
    for (const auto& bytes : steps[turn++ % steps.size()].frames)
      benchmark::DoNotOptimize(server.add_view(bytes));
    server.update([](std::size_t, std::size_t, std::span<const float> mean) {
      float* to = parameters.next(mean.size());
      for (std::size_t i = 0; i < mean.size(); ++i) to[i] -= learning_rate * mean[i];
    });
    benchmark::ClobberMemory();
  }
  set_counters(state, steps);
}

// Block by block, so that the sum stays in cache: the best that a plain loop does.
void dense_sum(benchmark::State& state) {
  const std::vector<frames_of_step> steps = everything.in_turn(static_cast<std::size_t>(state.range(0)));
  std::vector<std::vector<lamina::frame_view<float>>> views_of_step(steps.size());
  for (std::size_t s = 0; s < steps.size(); ++s) {
    for (const auto& bytes : steps[s].frames) {
      views_of_step[s].push_back(lamina::decode<float>(bytes, model));
    }
  }
  std::vector<float> sum(4096);
  std::size_t turn = 0;
  for (auto _ : state) {
    const std::vector<lamina::frame_view<float>>& views = views_of_step[turn++ % views_of_step.size()];
    for (std::size_t l = 0; l < model.layers(); ++l) {
      for (std::size_t begin = 0; begin < model.sizes()[l]; begin += sum.size()) {
        const std::size_t count = std::min(sum.size(), model.sizes()[l] - begin);
        std::copy_n(views[0].layer(l).data() + begin, count, sum.begin());
        for (std::size_t w = 1; w < views.size(); ++w) {
          const float* from = views[w].layer(l).data() + begin;
          for (std::size_t i = 0; i < count; ++i) sum[i] += from[i];
        }
        float* to = parameters.next(count);
        const float factor = learning_rate / static_cast<float>(views.size());
        for (std::size_t i = 0; i < count; ++i) to[i] -= factor * sum[i];
      }
    }
    benchmark::ClobberMemory();
  }
  set_counters(state, steps);
}

void workers(benchmark::internal::Benchmark* each) {
  const int most = lamina_benchmark::is_quick() ? 4 : lamina_benchmark::has_memory_for(10) ? 64 : 16;
  each->RangeMultiplier(4)->Range(1, most)->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(aggregate, some, some)->Apply(workers);
BENCHMARK_CAPTURE(aggregate, everything, everything)->Apply(workers);
BENCHMARK(dense_sum)->Apply(workers);

}  // namespace
