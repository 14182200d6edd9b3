// SPDX-License-Identifier: MIT
#include "network/prediction.hpp"

#include <algorithm>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "catch.hpp"
#include "support.hpp"

using namespace lamina_test;
namespace collectives = lamina::collectives;
using collectives::algorithm;
using collectives::algorithm_choice;
using collectives::layer_class;
using collectives::plan;
using lab::step_times;
using lab::waits;

namespace {

// A ring over four ranks whose latency is nothing, so that seconds are bytes alone.
constexpr collectives::cost_table bytes_alone = {1e-12, 1e-8, 1e-8, 1e-15};

// Equal layers, each a bucket, whose gradients become ready from the last to the first.
plan equal_layers(std::size_t layers) {
  std::vector<std::size_t> order(layers);
  for (std::size_t l = 0; l < layers; ++l) order[l] = layers - 1 - l;
  return {model_of(std::vector<std::size_t>(layers, 4'000)),
          4,
          order,
          std::vector<layer_class>(layers),
          {.bucket_bytes = 0, .choice = algorithm_choice::always(algorithm::ring)},
          bytes_alone};
}

double exposed(const plan& made, std::span<const collectives::task> tasks, const step_times& alone,
               waits where) {
  return lab::step_prediction(made, tasks).exposed(alone, where);
}

double communication_of(const plan& made) {
  double seconds = 0;
  for (const auto& each : made.buckets()) seconds += made.seconds_of(each);
  return seconds;
}

// Forward is a third of the step, and every layer takes the same time.
step_times evenly(std::size_t layers, double seconds) {
  step_times alone;
  alone.seconds = seconds;
  const auto share = [&](std::size_t l) { return static_cast<double>(l) / static_cast<double>(layers); };
  for (std::size_t l = 0; l < layers; ++l) {
    alone.needed.push_back(seconds * share(l) / 3);
    alone.ready.push_back(seconds * (1.0 / 3 + 2.0 / 3 * share(layers - l)));
  }
  return alone;
}

}  // namespace

// What docs/overlap/index.md says of M / C: backward hides at most min(M, 2/3 C), owners C as well, where they fill the link.
TEST_CASE("prediction: many equal layers expose what the bounds say") {
  const plan made = equal_layers(1000);
  const double m = communication_of(made);
  const auto share_of = [&](double m_over_c, const auto& tasks, waits where) {
    const double c = m / m_over_c;
    return exposed(made, tasks, evenly(1000, c), where) / c;
  };
  const auto sums = made.tasks();
  CHECK(share_of(0.5, sums, waits::at_the_end) == Approx(0).margin(2e-3));
  CHECK(share_of(1, sums, waits::at_the_end) == Approx(1.0 / 3).margin(2e-3));
  CHECK(share_of(4, sums, waits::at_the_end) == Approx(4 - 2.0 / 3).margin(8e-3));
  // Sums for all come in the order of the backward pass: what the next forward pass reads first is there last.
  CHECK(share_of(1, sums, waits::in_the_forward) == Approx(1.0 / 3).margin(2e-3));
  const auto owners = made.tasks_of_owners();
  CHECK(share_of(0.5, owners, waits::in_the_forward) == Approx(0).margin(2e-3));
  CHECK(share_of(1, owners, waits::in_the_forward) == Approx(1.0 / 6).margin(2e-3));
  CHECK(share_of(1, owners, waits::at_the_end) == Approx(1.0 / 2).margin(2e-3));
}

// Two layers, of two and four seconds.
TEST_CASE("prediction: a step with owners, by hand") {
  const plan made(
      {model_of({50'000'000, 100'000'000})}, 2, std::vector<std::size_t>{1, 0}, std::vector<layer_class>(2),
      {.bucket_bytes = 0, .choice = algorithm_choice::always(algorithm::ring)}, {1e-12, 1e-8, 1e-8, 1e-15});
  REQUIRE(made.seconds_of(made.buckets()[0]) == Approx(4));  // of layer 1
  REQUIRE(made.seconds_of(made.buckets()[1]) == Approx(2));
  const step_times alone = {{0, 1}, {6, 4}, 6};
  // Layer 1 to its owners from 4 to 6, layer 0 from 6 to 7; to all: layer 0 from 7 to 8, layer 1 from 8 to 10. Layer 0 waits until 8
  // for what it reads at 6, layer 1 until 10 for what it would then read at 9: the step is 3 s longer, and so is each that follows.
  const auto tasks = made.tasks_of_owners();
  CHECK(exposed(made, tasks, alone, waits::in_the_forward) == Approx(3));
  CHECK(exposed(made, tasks, alone, waits::at_the_end) == Approx(4));
  // Read at 2, both have to wait until 10, which is 4; read at 4, they are there. But the first gradient waits for the last of the
  // step before: ready at 3, it waits for one second.
  CHECK(exposed(made, tasks, {{2, 2}, {6, 4}, 6}, waits::in_the_forward) == Approx(2));
  CHECK(exposed(made, tasks, {{4, 4}, {6, 4}, 6}, waits::in_the_forward) == Approx(0).margin(1e-6));
  CHECK(exposed(made, tasks, {{4, 4}, {6, 3}, 6}, waits::in_the_forward) == Approx(1));
  // The first gradient is there at once, and waits for the parameters of the step before, whose link was never idle.
  CHECK(exposed(made, tasks, {{4, 4}, {4, 0}, 6}, waits::in_the_forward) == Approx(2));
}

TEST_CASE("prediction: where all is waited for at the end, the last collective counts") {
  std::mt19937 random(77);
  for (int round = 0; round < 30; ++round) {
    const std::size_t layers = 1 + below(random, 12);
    const plan made = equal_layers(layers);
    step_times alone;
    alone.seconds = communication_of(made) * static_cast<double>(1 + below(random, 300)) / 100;
    for (std::size_t l = 0; l < layers; ++l) {
      alone.needed.push_back(0);
      alone.ready.push_back(alone.seconds * static_cast<double>(below(random, 101)) / 100);
    }
    double end = 0;  // end_j = max(end_{j-1}, ready_j) + seconds_j
    for (const auto& each : made.buckets())
      end = std::max(end, alone.ready[each.layers.front()]) + made.seconds_of(each);
    CHECK(exposed(made, made.tasks(), alone, waits::at_the_end) ==
          Approx(std::max(0.0, end - alone.seconds)).margin(1e-12));
  }
}

TEST_CASE("prediction: times that cannot be are refused by name") {
  const plan made = equal_layers(2);
  const auto refusal = [&](const step_times& alone) {
    return message_of<std::invalid_argument>(
        [&] { static_cast<void>(exposed(made, made.tasks(), alone, waits::in_the_forward)); });
  };
  CHECK(refusal({{0, 0}, {1, 1}, 1}) == "(no exception)");
  CHECK(refusal({{0}, {1, 1}, 1}) == "there are 1 times for 2 layers");
  CHECK(refusal({{0, 0}, {1, 1, 1}, 1}) == "there are 3 times for 2 layers");
  CHECK(contains(refusal({{0, 0}, {1, 1.5}, 1}), "layer 'layer1' cannot be ready after 1.5"));
  CHECK(contains(refusal({{-1, 0}, {1, 1}, 1}), "layer 'layer0' cannot be needed after -1"));
  CHECK(contains(refusal({{0, 0}, {1, std::numeric_limits<double>::quiet_NaN()}, 1}), "cannot be ready"));
  CHECK(contains(refusal({{0, 0}, {1, 1}, std::numeric_limits<double>::infinity()}), "a step cannot take"));
}
