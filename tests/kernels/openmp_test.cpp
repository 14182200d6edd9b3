// SPDX-License-Identifier: MIT
#include <omp.h>

#include <random>

#include "accumulate.hpp"
#include "catch.hpp"
#include "lamina/execution.hpp"
#include "lamina/residual.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

using namespace lamina_test;

// Layers of one task, of two, and of three with a short block at the end.
TEMPLATE_TEST_CASE("openmp: any number of threads gives bitwise what one does", "", float, double) {
  std::mt19937 random(501);
  const lamina::layout model = model_of({1, 262'210, 4096, 131'073, 0, 65'541});
  const int threads = GENERATE(0, 1, 2, 3, 7);
  const auto check = GENERATE(lamina::non_finite::refuse, lamina::non_finite::skip);
  const lamina::worker_options options{.drop_ratio = 0.5, .non_finite = check};
  lamina::worker<TestType> by_one(model, options);
  lamina::worker<TestType> by_many(model, options);
  for (int t = 0; t < 4; ++t) {
    std::vector<std::vector<TestType>> gradients;
    for (const std::size_t size : model.sizes())
      gradients.push_back(random_fractions<TestType>(random, size));
    auto a = by_one.add(gradients);
    auto b = by_many.add(gradients, 1, lamina::openmp{threads});
    REQUIRE(same_bits(a.values(), b.values()));
    REQUIRE(a.frame().to_bytes() == b.frame().to_bytes());
    REQUIRE(same_bits(by_one.residual().elements(), by_many.residual().elements()));
    a.commit();
    b.commit();
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
