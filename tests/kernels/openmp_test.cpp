// SPDX-License-Identifier: MIT
#include <omp.h>

#include <random>

#include "accumulate.hpp"
#include "catch.hpp"
#include "kernel_cases.hpp"
#include "lamina/execution.hpp"
#include "lamina/residual.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

using namespace lamina_test;

TEMPLATE_TEST_CASE("openmp: any number of threads gives the same bits as one", "", float, double) {
  std::mt19937 random(501);
  const lamina::layout model = model_of({1, 300'000, 4096, 131'073, 0});
  const int threads = GENERATE(0, 1, 2, 3, 7);
  lamina::worker<TestType> alone(model, {.drop_ratio = 0.5});
  lamina::worker<TestType> together(model, {.drop_ratio = 0.5});
  for (int t = 0; t < 4; ++t) {
    std::vector<std::vector<TestType>> gradients;
    for (const std::size_t size : model.sizes())
      gradients.push_back(random_fractions<TestType>(random, size));
    auto a = alone.add(gradients);
    auto b = together.add(gradients, 1, lamina::openmp{threads});
    REQUIRE(same_bits(a.values(), b.values()));
    REQUIRE(a.frame().to_bytes() == b.frame().to_bytes());
    a.commit();
    b.commit();
  }
}

// One piece, two, and three with a short block at the end.
TEMPLATE_TEST_CASE("openmp: each kernel follows the literal order with 1, 2, 3 and 7 threads", "", float,
                   double) {
  std::mt19937 random(502);
  for (const std::size_t elements : {65'541, 131'073, 262'210}) {
    for (const kind of : kinds) {
      const auto gradient = values_of<TestType>(of, random, elements);
      auto sum = gradient;
      for (TestType& each : sum) each = (TestType(0) + each) + each;  // a clear residual has no -0
      const auto expected = literal_values(sum);
      for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
        lamina::residual_accumulator<TestType> residual(model_of({3, elements}), {.non_finite = check});
        for_each_kernel([&](std::size_t f, const auto& functor) {
          for (const int threads : {1, 2, 3, 7}) {
            const auto where = [&] {
              return functor_names[f] + (" with threads: " + std::to_string(threads)) +
                     ", elements: " + std::to_string(elements) +
                     ", kind: " + std::to_string(static_cast<int>(of));
            };
            residual.clear(1);
            accumulate(residual, 1, gradient, functor, lamina::openmp{threads});
            require_same_bits(accumulate(residual, 1, gradient, functor, lamina::openmp{threads}),
                              expected[f], where);
            require_same_bits(residual[1], sum, where);
          }
        });
      }
    }
  }
}

TEST_CASE("openmp: the pieces really run on as many threads as asked for") {
  std::vector<int> thread_of(64, -1);
  lamina::openmp{2}(thread_of.size(), [&](std::size_t i) { thread_of[i] = omp_get_thread_num(); });
  CHECK(std::ranges::count(thread_of, 0) == 32);
  CHECK(std::ranges::count(thread_of, 1) == 32);
}

TEST_CASE("openmp: says how many threads it starts") {
  CHECK(lamina::openmp{3}.threads() == 3);
  CHECK(lamina::openmp{}.threads() == static_cast<std::size_t>(omp_get_max_threads()));
  CHECK(lamina::detail::threads_of(lamina::openmp{5}) == 5);
}
