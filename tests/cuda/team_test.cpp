// SPDX-License-Identifier: MIT
// The device's cases by teams of threads that run at the same time, as on a GPU.
#include <utility>

#include "cases.hpp"
#include "catch.hpp"
#include "threads_execution.hpp"

TEST_CASE("cuda: a team of threads does what one does") {
  // What one order of a team's threads hides, the other shows.
  const auto [threads, begins_forwards] =
      GENERATE(std::pair(2U, true), std::pair(2U, false), std::pair(5U, false));
  lamina_test::for_each_case(lamina_test::by_threads(threads, begins_forwards),
                             [&](const auto& name, const auto& run) {
                               INFO(name << ", " << threads << " threads");
                               REQUIRE_NOTHROW(run());
                             });
}
