// SPDX-License-Identifier: MIT
// The device's cases by thread blocks whose threads run at the same time, as on a GPU.
#include <cstddef>
#include <iostream>
#include <set>
#include <string>
#include <utility>

#include "cases.hpp"
#include "catch.hpp"
#include "threads_execution.hpp"

TEST_CASE("cuda: a thread block does what the CPU does") {
  // What one order of the threads hides, the other shows.
  const auto [threads, begins_forwards] = GENERATE(std::pair(2U, true), std::pair(5U, false));
  lamina_test::for_each_case(lamina_test::by_threads(threads, begins_forwards),
                             [&](const std::string& name, const auto& run) {
                               // A block does the same work there as elsewhere, and one order takes ten seconds.
                               if (name.starts_with("at scale") && !begins_forwards) return;
                               INFO(name << ", " << threads << " threads");
                               REQUIRE_NOTHROW(run());
                             });
}

TEST_CASE("cuda: a search by a thread block of many threads") {
  const auto [threads, begins_forwards] = GENERATE(std::pair(128U, true), std::pair(1024U, false));
  for (const std::size_t layers : {161U, 5000U}) {
    INFO(layers << " layers, " << threads << " threads");
    REQUIRE_NOTHROW(
        lamina_test::finds_the_crossing(lamina_test::by_threads(threads, begins_forwards), layers, 6));
  }
}

// ./tests/cuda/run picks cases by these names.
TEST_CASE("cuda: the names of all cases differ", "[.names]") {
  std::set<std::string> names;
  lamina_test::for_each_case(lamina_test::by_threads(2, true), [&](const auto& name, const auto&) {
    std::cout << name << '\n';
    INFO(name);
    REQUIRE(names.insert(name).second);
  });
}
