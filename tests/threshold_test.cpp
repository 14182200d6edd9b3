// SPDX-License-Identifier: MIT
#include "lamina/threshold.hpp"

#include "catch.hpp"

TEST_CASE("threshold: the layer that crosses R*N gives the value") {
  const std::vector<double> values = {0.5, 0.1, 0.3};
  const std::vector<std::size_t> sizes = {10, 80, 10};
  REQUIRE(lamina::search_threshold(values, sizes, 0.79) == 0.1);
  REQUIRE(lamina::search_threshold(values, sizes, 0.80) == 0.3);
}
