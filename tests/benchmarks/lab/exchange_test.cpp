// SPDX-License-Identifier: MIT
#include "catch.hpp"

#include <cstdint>
#include <vector>

#include "common/model.hpp"
#include "exchange_steps.hpp"

namespace {

TEST_CASE("exchange: layers rotate, and all have their turn before one has its second") {
  const lamina::layout model = lamina_benchmark::equal_layers(12, 10);
  exchange::rotation layers(model, 0.25);
  for (int round = 0; round < 3; ++round) {
    std::vector<int> seen(12);
    for (int step = 0; step < 4; ++step) {
      const lamina::selection& chosen = layers.next();
      CHECK(chosen.sent_layers() == 3);
      for (const std::size_t l : chosen.sent()) ++seen[l];
    }
    CHECK(seen == std::vector<int>(12, 1));
  }
}

TEST_CASE("exchange: the share is kept on the average where layers differ") {
  const lamina::layout model({{"a", {1000}}, {"b", {10}}, {"c", {300}}, {"d", {7}}, {"e", {83}}});
  exchange::rotation layers(model, 0.2);
  std::uint64_t sent = 0;
  for (int step = 1; step <= 500; ++step) {
    sent += layers.next().sent_elements();
    // At most the largest layer ahead, and never behind.
    CHECK(sent >= static_cast<std::uint64_t>(280 * step));
    CHECK(sent < static_cast<std::uint64_t>(280 * step + 1000));
  }
}

}  // namespace
