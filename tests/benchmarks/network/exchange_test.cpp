// SPDX-License-Identifier: MIT
#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/model.hpp"
#include "exchange_steps.hpp"
#include "messages/in_process_transport.hpp"

namespace {

using lab::transport;

std::string name_of(std::size_t rank) {
  return "rank " + std::to_string(rank);
}

std::vector<exchange::step_seen> run(const exchange::exchange_plan& plan, std::size_t workers,
                                     std::optional<lab::lossy_options> losses = {}) {
  std::vector<exchange::step_seen> seen;
  lab::run_in_process(workers + 1,
                              [&](transport& ranks) {
                                if (ranks.rank() > 0) return exchange::work(ranks, plan);
                                seen = exchange::serve(ranks, plan);
                              },
                              {.name_of = name_of, .on_death = {}, .losses = losses});
  return seen;
}

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

TEST_CASE("exchange: layers of a step come from all over the layout") {
  const lamina::layout model = lamina_benchmark::equal_layers(1636, 10);
  exchange::rotation layers(model, 16.0 / 1636);
  for (int step = 0; step < 20; ++step) {
    std::vector<int> quarters(4);
    for (const std::size_t l : layers.next().sent()) ++quarters[4 * l / 1636];
    for (const int each : quarters) CHECK(each >= 3);
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

TEST_CASE("exchange: a share of everything is everything; others are refused") {
  const lamina::layout model = lamina_benchmark::equal_layers(5, 8);
  exchange::rotation layers(model, 1);
  CHECK(layers.next().sent_layers() == 5);
  CHECK(layers.next().sent_layers() == 5);
  for (const double share : {0.0, -0.5, 1.5, std::nan("")})
    CHECK_THROWS_WITH(exchange::rotation(model, share), Catch::Contains("share of a frame"));
}

TEST_CASE("exchange: it counts the bytes of all frames and orders its times") {
  const lamina::layout model = lamina_benchmark::equal_layers(8, 1000);
  const auto seen = run({.layers = model, .share = 0.25, .steps = 6}, 3);
  REQUIRE(seen.size() == 6);
  // Nothing goes down in the first step: all begin with zeros. From then on what went up before.
  const std::uint64_t head = seen[0].bytes_down / 3;
  CHECK(head <= 128);
  for (const exchange::step_seen& each : seen) {
    CHECK(each.bytes_up == 3 * (head + 2 * 4000));
    if (each.step > 1) CHECK(each.bytes_down == 3 * (head + 2 * 4000));
    CHECK(each.up_seconds > 0);
    CHECK(each.down_seconds > 0);
    CHECK(each.seconds >= std::max(each.up_seconds, each.down_seconds));
    CHECK(each.period_seconds >= each.seconds);
    CHECK(each.up.packets == 0);
  }
}

TEST_CASE("exchange: over a network that loses packets it keeps to its bounds, and replicas end equal") {
  const lamina::layout model = lamina_benchmark::equal_layers(8, 7040);  // of 20 chunks each
  exchange::exchange_plan plan{.layers = model, .share = 0.5, .steps = 20};
  plan.losses = {.is_lossy = true, .bound_up_ppm = 100'000, .bound_down_ppm = 100'000};
  // That replicas are equal at the end serve() checks.
  const auto seen =
      run(plan, 2,
          lab::lossy_options{
              .loss = 0.2, .seed = 7, .most_bound_up_ppm = 100'000, .most_bound_down_ppm = 100'000});
  double missing = 0;
  for (const exchange::step_seen& each : seen) {
    CHECK(each.up.lost_share() <= 0.1);
    CHECK(each.down.lost_share() <= 0.1);
    CHECK(each.up.packets >= 2 * 4 * 18);
    missing += each.up.lost_share();
  }
  CHECK(missing > 0);
}

}  // namespace
