// SPDX-License-Identifier: MIT
#include "network/calibration.hpp"

#include <functional>
#include <limits>
#include <stdexcept>
#include <tuple>

#include "catch.hpp"
#include "collectives/memory_ranks.hpp"

using namespace lamina_test;
using namespace std::chrono_literals;

TEST_CASE("calibration: all ranks have the same table, and its constants can be") {
  for (const std::size_t ranks : {1U, 2U, 3U}) {
    memory_network network(ranks);
    std::vector<collectives::cost_table> tables(ranks);
    const auto errors = in_threads(ranks, [&](std::size_t r) {
      tables[r] = lab::calibrate(
          network.of(r),
          {.latency_rounds = 20, .most_bytes = 1 << 20U, .least_bytes = 1 << 19U, .timeout = 20s});
    });
    CHECK(errors == std::vector<std::string>(ranks));
    for (const auto& each : tables) {
      if (ranks > 1) CHECK(each == tables[0]);
      collectives::check_costs(each);
    }
  }
  memory_network network(2);
  const auto errors = in_threads(2, [&](std::size_t r) {
    std::ignore = lab::calibrate(
        network.of(r), {.latency_rounds = 20, .most_bytes = 1 << 20U, .known_rate = 1, .timeout = 20s});
  });
  for (const auto& each : errors) {
    CHECK(contains(each, "beta_one_way was measured as"));
    CHECK(contains(each, "quicker than the rate of the network allows"));
  }
}

TEST_CASE("calibration: rounds of sixteen pieces, as many as the bytes and the seconds allow") {
  constexpr std::size_t piece = 60'000;
  const auto pieces_sent = [&](lab::calibration_options options) {
    std::size_t count = 0;  // under the network's lock
    memory_network network(2, {.interfere = [&](const seen_message& seen) {
                             count += seen.bytes.size() == piece ? 1 : 0;
                             return fate::arrives;
                           }});
    options.latency_rounds = 1;
    options.timeout = 20s;
    const auto errors =
        in_threads(2, [&](std::size_t r) { std::ignore = lab::calibrate(network.of(r), options); });
    CHECK(errors == std::vector<std::string>(2));
    return count / 2 / 2;  // of a rank, in one of two measurements
  };
  CHECK(pieces_sent({.least_bytes = 0, .seconds = 0}) == 16);
  CHECK(pieces_sent({.least_bytes = 48 * piece, .seconds = 0}) == 48);
  CHECK(pieces_sent({.most_bytes = 40 * piece, .seconds = 1000}) == 32);
  CHECK(pieces_sent({.most_bytes = 1, .seconds = 1000}) == 16);
}

TEST_CASE("calibration: the largest of each constant, to the bit") {
  memory_network network(3);
  std::vector<collectives::cost_table> agreed(3);
  const auto errors = in_threads(3, [&](std::size_t r) {
    const auto k = static_cast<double>(r);
    agreed[r] = lab::agree_on_costs(network.of(r), {1e-4 * (1 + k), 1e-8, 3e-8 - 1e-8 * k, 1.2345e-10});
  });
  CHECK(errors == std::vector<std::string>(3));
  for (const auto& each : agreed) CHECK(each == collectives::cost_table{1e-4 * 3.0, 1e-8, 3e-8, 1.2345e-10});
}

TEST_CASE("calibration: a rank that gives up leaves no message behind, and its channel has ended") {
  constexpr lab::calibration_options quick = {
      .latency_rounds = 20, .most_bytes = 1 << 20U, .least_bytes = 1 << 19U, .timeout = 20ms};
  memory_network network(2);
  const auto calibrate = [&](std::size_t r) { std::ignore = lab::calibrate(network.of(r), quick); };
  CHECK(contains(message_of<collectives::channel_error>([&] { calibrate(1); }),
                 "nothing heard for 20 ms from rank 0"));
  CHECK(network.under_way() == 0);
  CHECK(contains(message_of<std::logic_error>([&] { calibrate(1); }), "make a new channel"));
  CHECK(message_of<collectives::channel_error>([&] { calibrate(0); }) == "rank 1 has left");
}

TEST_CASE("calibration: a constant of one rank that cannot be is refused on all") {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double bad : {nan, -1.0, 0.0, std::numeric_limits<double>::infinity()}) {
    for (const std::size_t at : {0U, 1U, 2U}) {
      memory_network network(3);
      const auto errors = in_threads(3, [&](std::size_t r) {
        std::ignore = lab::agree_on_costs(network.of(r), {1e-4, 1e-8, r == at ? bad : 1e-8, 1e-10}, 5s);
      });
      for (const std::string& each : errors) CHECK(contains(each, "the cost beta_both_ways is "));
    }
  }
}

TEST_CASE("calibration: options that cannot be are refused by name, before a message is sent") {
  memory_network network(2);
  const auto refusal = [&](const lab::calibration_options& options) {
    return message_of<std::invalid_argument>([&] { std::ignore = lab::calibrate(network.of(0), options); });
  };
  CHECK(contains(refusal({.latency_rounds = 0}), "latency_rounds is 0"));
  CHECK(contains(refusal({.pieces = {.both_ways = 0}}), "a piece of 0 bytes"));
  CHECK(contains(refusal({.pieces = {.one_way = 35}}), "a piece of 35 bytes"));
  CHECK(contains(refusal({.seconds = -1}), "seconds is -1"));
  CHECK(contains(refusal({.known_rate = std::numeric_limits<double>::quiet_NaN()}), "known_rate is"));
  CHECK(network.under_way() == 0);
  CHECK_NOTHROW(network.of(0).progress());
}
