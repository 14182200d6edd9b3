// SPDX-License-Identifier: MIT
// What the library says of threads, for the thread sanitizer: layers of a residual may be used from different threads at a
// time, a layout and a frame by all, and an execution may run the pieces of a step on threads of its own. With --race one
// layer is used by two threads, which is not allowed: the sanitizer must say so.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "accumulate.hpp"
#include "executions.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

namespace {

using lamina_test::accumulate;
using lamina_test::same_bits;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Calls work(0), ..., work(count - 1), each in a thread of its own.
template <class Work>
void at_once(std::size_t count, const Work& work) {
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) threads.emplace_back([&work, i] { work(i); });
  for (std::thread& each : threads) each.join();
}

}  // namespace

int main(int argc, char** argv) {
  const bool races = argc > 1 && std::strcmp(argv[1], "--race") == 0;
  // Layers that share a cache line, layers that fill several pieces, and an empty one.
  const lamina::layout model = lamina_test::model_of({3, 70'000, 0, 5, 300'000, 1});
  std::mt19937 random(1);
  std::vector<std::vector<float>> gradients;
  for (const std::size_t size : model.sizes()) {
    gradients.push_back(lamina_test::random_fractions<float>(random, size));
  }

  for (const double momentum : {0.0, 0.9}) {
    for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
      lamina::residual_accumulator<float> alone(model, {.momentum = momentum, .non_finite = check});
      lamina::residual_accumulator<float> together(model, {.momentum = momentum, .non_finite = check});
      for (int step = 0; step < 3; ++step) {
        std::vector<double> expected(model.layers());
        std::vector<double> values(model.layers());
        for (std::size_t l = 0; l < model.layers(); ++l) expected[l] = accumulate(alone, l, gradients[l]);
        at_once(model.layers(), [&](std::size_t l) {
          values[l] = accumulate(together, races ? 1 : l, gradients[races ? 1 : l]);
          if (l % 2 == 0) together.clear(l);
          require(together[l].size() == model.sizes()[l], "a layer of another size");
        });
        for (std::size_t l = 0; l < model.layers(); l += 2) alone.clear(l);
        require(same_bits(values, expected), "threads give other values");
        require(same_bits(alone.elements(), together.elements()), "threads give other residuals");
      }
    }
  }

  // Whoever reads a clear layer first writes its zeros, and others may read it meanwhile.
  lamina::residual_accumulator<float> cleared(model, {.momentum = 0.5});
  for (int round = 0; round < 20; ++round) {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      accumulate(cleared, l, gradients[l]);
      cleared.clear(l);
    }
    const auto& read = cleared;
    std::array<double, 4> sums{};
    at_once(sums.size(), [&](std::size_t i) {
      for (std::size_t l = 0; l < model.layers(); ++l)
        for (const float each : read[l]) sums[i] += std::abs(static_cast<double>(each));
      for (const float each : read.velocity()) sums[i] += std::abs(static_cast<double>(each));
    });
    require(sums == std::array<double, 4>{}, "a clear layer is not zero");
  }

  lamina::worker<float> alone(model, {.drop_ratio = 0.5});
  lamina::worker<float> with_pool(model, {.drop_ratio = 0.5});
  for (int t = 0; t < 3; ++t) {
    auto of_one = alone.add(gradients);
    auto of_pool = with_pool.add(gradients, 1, lamina_test::in_threads_of(3));
    const std::vector<std::byte> bytes = of_pool.frame().to_bytes();
    require(of_one.frame().to_bytes() == bytes, "a pool gives another frame");
    const auto frame = lamina::decode<float>(bytes, model);
    at_once(4, [&](std::size_t) {
      const auto own = lamina::decode<float>(bytes, model);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        require(own.is_dropped(l) == frame.is_dropped(l), "threads read other frames");
        if (!own.is_dropped(l)) require(same_bits(own.layer(l), frame.layer(l)), "threads read other layers");
      }
    });
    of_one.commit();
    of_pool.commit();
  }
  std::puts("the same from threads");
}
