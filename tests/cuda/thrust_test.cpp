// SPDX-License-Identifier: MIT
// The device's cases where Thrust's device is the CPU.
#include <thrust/execution_policy.h>

#include <iostream>
#include <set>
#include <string>

#include "cases.hpp"
#include "catch.hpp"
#include "lamina/cuda/thrust_execution.hpp"

TEST_CASE("thrust: a device does what the CPU does") {
  lamina_test::for_each_case(lamina::cuda::with_policy(thrust::device),
                             [](const auto& name, const auto& run) {
                               INFO(name);
                               REQUIRE_NOTHROW(run());
                             });
}

// ./tests/cuda/run picks cases by these names.
TEST_CASE("thrust: the names of all cases differ", "[.names]") {
  std::set<std::string> names;
  lamina_test::for_each_case(lamina::cuda::with_policy(thrust::device), [&](const auto& name, const auto&) {
    std::cout << name << '\n';
    INFO(name);
    REQUIRE(names.insert(name).second);
  });
}
