// SPDX-License-Identifier: MIT
// A few of the device's cases where Thrust's device is the CPU by one of its systems, and where LAMINA_TEST_WRAPPED says so with Thrust in
// a namespace of its own. All cases are run by thread_block_test.cpp.
#if defined(LAMINA_TEST_WRAPPED)
namespace wrapped::thrust {}
namespace thrust = wrapped::thrust;
#endif

#include <thrust/execution_policy.h>

#include "catch.hpp"
#include "follow_cases.hpp"
#include "lamina/cuda/thrust_execution.hpp"

TEST_CASE("thrust: a device does what the CPU does") {
  const auto execution = lamina::cuda::with_policy(thrust::device);
  const auto follow = [&](const lamina_test::course& of) {
    REQUIRE_NOTHROW(lamina_test::follows_the_cpu<float, float>(execution, of));
  };
  follow(
      {.options = {.drop_ratio = 0.7, .momentum = 0.9, .payload = lamina::payload_type::int8}, .skipped = 1});
  follow({.options = {.send_budget = 0.3, .fragment_elements = 4096},
          .steps = 4,
          .sizes = {4'500'000, 1, 70'000}});
}
