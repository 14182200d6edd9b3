// SPDX-License-Identifier: MIT
#include <omp.h>

#include <random>

#include "catch.hpp"
#include "lamina/execution.hpp"
#include "steps.hpp"

using namespace lamina_test;

// Layers of one task, of two, and of three with a short block at the end.
TEST_CASE("openmp: any number of threads gives bitwise what one does") {
  std::mt19937 random(501);
  const lamina::layout model = model_of({1, 262'210, 4096, 131'073, 0, 65'541});
  for (const int threads : {0, 1, 2, 3, 7}) {
    lamina::worker<float> by_one(model, {.drop_ratio = 0.5});
    lamina::worker<float> by_many(model, {.drop_ratio = 0.5});
    for (int t = 0; t < 3; ++t) {
      const auto gradients = rounding_gradients<float>(random, model);
      const auto frame = send(by_one, gradients);
      auto step = by_many.add(gradients, 1, lamina::openmp{threads});
      REQUIRE(step.frame().to_bytes() == frame);
      step.commit();
      REQUIRE(by_many.save() == by_one.save());
    }
  }
}

TEST_CASE("openmp: the tasks run on as many threads as asked for, which it tells") {
  std::vector<int> thread_of(64, -1);
  lamina::openmp{2}(thread_of.size(), [&](std::size_t i) { thread_of[i] = omp_get_thread_num(); });
  CHECK(std::ranges::count(thread_of, 0) == 32);
  CHECK(std::ranges::count(thread_of, 1) == 32);
  CHECK(lamina::openmp{3}.threads() == 3);
  CHECK(lamina::openmp{}.threads() == static_cast<std::size_t>(omp_get_max_threads()));
  CHECK(lamina::detail::threads_of(lamina::openmp{5}) == 5);
}
