// SPDX-License-Identifier: MIT
#include <omp.h>

#include <random>

#include "catch.hpp"
#include "lamina/execution.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

using namespace lamina_test;

TEMPLATE_TEST_CASE("openmp: any number of threads gives the same bits as one", "", float, double) {
  std::mt19937 random(501);
  const lamina::layout model = model_of({1, 300'000, 4096, 131'073, 0});
  const int threads = GENERATE(0, 1, 2, 3, 7);
  lamina::gradient_compressor<TestType> alone(model, {.drop_ratio = 0.5});
  lamina::gradient_compressor<TestType> together(model, {.drop_ratio = 0.5});
  for (int step = 0; step < 4; ++step) {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const auto gradient = random_fractions<TestType>(random, model.sizes()[l]);
      const double value = alone.accumulate(l, gradient);
      REQUIRE(same_bits(together.accumulate(l, gradient, lamina::openmp{threads}), value));
    }
    REQUIRE(alone.encode().to_bytes() == together.encode().to_bytes());
    alone.commit();
    together.commit();
  }
}

TEST_CASE("openmp: the pieces really run on as many threads as asked for") {
  std::vector<int> thread_of(64, -1);
  lamina::openmp{2}(thread_of.size(), [&](std::size_t i) { thread_of[i] = omp_get_thread_num(); });
  CHECK(std::ranges::count(thread_of, 0) == 32);
  CHECK(std::ranges::count(thread_of, 1) == 32);
}
