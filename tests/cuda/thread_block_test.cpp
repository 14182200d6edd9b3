// SPDX-License-Identifier: MIT
// The device's cases by thread blocks whose threads run at the same time, as on a GPU.
#include <thrust/execution_policy.h>

#include <cstddef>
#include <utility>

#include "cases.hpp"
#include "catch.hpp"
#include "lamina/cuda/thrust_execution.hpp"
#include "threads_execution.hpp"

TEST_CASE("cuda: a thread block does what one thread does") {
  // What one order of the threads hides, the other shows.
  const auto [threads, begins_forwards] =
      GENERATE(std::pair(2U, true), std::pair(2U, false), std::pair(5U, false));
  lamina_test::for_each_case(lamina_test::by_threads(threads, begins_forwards),
                             [&](const auto& name, const auto& run) {
                               INFO(name << ", " << threads << " threads");
                               REQUIRE_NOTHROW(run());
                             });
}

TEST_CASE("cuda: a search by a thread block of many threads") {
  const auto [threads, begins_forwards] = GENERATE(std::pair(128U, true), std::pair(1024U, false));
  for (const std::size_t layers : {161U, 300U, 5000U}) {
    INFO(layers << " layers, " << threads << " threads");
    REQUIRE_NOTHROW(
        lamina_test::finds_the_crossing(lamina_test::by_threads(threads, begins_forwards), layers, 6));
  }
}

// Gradients are written outside of the stream. Here nothing runs before it is waited for, so a case that does not wait writes over
// what a launch has still to read, which a GPU does now and then.
TEST_CASE("cuda: cases wait before they write what a launch reads") {
  const auto policy = lamina::cuda::with_policy(thrust::device);
  const lamina_test::late stream(policy);
  lamina_test::for_each_order_case(stream, [&](const auto& name, const auto& run) {
    INFO(name);
    REQUIRE_NOTHROW(run());
    stream.forget();
  });
}
