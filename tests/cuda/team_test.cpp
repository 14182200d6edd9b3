// SPDX-License-Identifier: MIT
// The device's cases by teams of threads that run at the same time, as on a GPU.
#include "cases.hpp"
#include "catch.hpp"
#include "threads_execution.hpp"

TEST_CASE("cuda: a team of threads does what one does") {
  const unsigned threads = GENERATE(2U, 5U);
  lamina_test::for_each_case(lamina_test::by_threads(threads), [&](const auto& name, const auto& run) {
    INFO(name << ", " << threads << " threads");
    REQUIRE_NOTHROW(run());
  });
}
