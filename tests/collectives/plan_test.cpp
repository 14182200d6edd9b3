// SPDX-License-Identifier: MIT
#include "lamina/collectives/plan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "catch.hpp"
#include "simulated_ranks.hpp"

using namespace lamina_test;
using collectives::algorithm;
using collectives::algorithm_choice;
using collectives::cost_table;
using collectives::layer_class;
using collectives::operation;
using collectives::plan;

namespace {

constexpr cost_table costs = {3e-4, 8e-9, 1.6e-8, 2e-10};

std::vector<std::size_t> reversed_order(std::size_t layers) {
  std::vector<std::size_t> order(layers);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return order;
}

plan plan_of(const std::vector<std::size_t>& sizes, const collectives::plan_options& options = {},
             std::size_t ranks = 4) {
  return plan(model_of(sizes), ranks, reversed_order(sizes.size()),
              std::vector<layer_class>(sizes.size(), layer_class::convolutional), options, costs);
}

std::vector<std::vector<std::size_t>> layers_in(const plan& given) {
  std::vector<std::vector<std::size_t>> all;
  for (const auto& each : given.buckets()) all.push_back(each.layers);
  return all;
}

}  // namespace

// The closed formula of each algorithm, apart from the schedules from which seconds_of takes its rounds.
TEST_CASE("cost: the seconds of the rounds are the formulas") {
  for (const std::size_t ranks : {1U, 2U, 4U, 8U, 16U}) {
    const std::size_t elements = 16 * 1024;
    const double bytes = 4.0 * static_cast<double>(elements);
    const auto p = static_cast<double>(ranks);
    const double k = std::log2(p);
    const double ring_beta = ranks == 2 ? costs.beta_both_ways : costs.beta_one_way;
    const double ring =
        2 * (p - 1) * costs.alpha + 2 * (p - 1) / p * bytes * ring_beta + (p - 1) / p * bytes * costs.gamma;
    const double opposite = ranks % 2 == 0 ? 2 / p * bytes * (costs.beta_both_ways - ring_beta) : 0;
    const auto seconds = [&](algorithm how) {
      return collectives::seconds_of(operation::all_reduce, how, ranks, elements, costs);
    };
    CHECK(seconds(algorithm::ring) == Approx(ring));
    // Eight rounds at once have one latency.
    CHECK(seconds(algorithm::pairwise) ==
          Approx(ring + opposite - 2 * (p - 1 - std::ceil((p - 1) / 8)) * costs.alpha));
    CHECK(seconds(algorithm::halving_doubling) ==
          Approx(2 * k * costs.alpha + (p - 1) / p * bytes * (2 * costs.beta_both_ways + costs.gamma)));
    CHECK(collectives::seconds_of(operation::reduce_scatter, algorithm::ring, ranks, elements, costs) +
              collectives::seconds_of(operation::all_gather, algorithm::ring, ranks, elements, costs) ==
          Approx(ring));
  }
  // The fold: 2 (alpha + S beta) + S gamma.
  const auto of = [](std::size_t ranks) {
    return collectives::seconds_of(operation::all_reduce, algorithm::halving_doubling, ranks, 1000, costs);
  };
  CHECK(of(5) - of(4) == Approx(2 * (costs.alpha + 4000 * costs.beta_one_way) + 4000 * costs.gamma));
}

TEST_CASE("cost: the cheapest algorithm goes by latency where little is sent, and by bytes where much is") {
  const cost_table symmetric = {3e-4, 8e-9, 8e-9, 1e-12};
  CHECK(collectives::cheapest(4, 64, symmetric) == algorithm::pairwise);
  CHECK(collectives::cheapest(64, 64, symmetric) == algorithm::halving_doubling);
  CHECK(collectives::cheapest(64, 1 << 20U, symmetric) == algorithm::halving_doubling);
  CHECK(collectives::cheapest(4, 1 << 20U, {3e-4, 8e-9, 1.6e-8, 1e-12}) == algorithm::ring);
  CHECK(collectives::cheapest(1, 1000, symmetric) == algorithm::ring);  // nothing is sent: a tie
}

TEST_CASE("plan: buckets are of consecutive layers of one class, in the order in which they become ready") {
  const std::vector<std::size_t> sizes = {100, 200, 300, 50, 50, 1000};
  CHECK(layers_in(plan_of(sizes, {.bucket_bytes = 0})) ==
        std::vector<std::vector<std::size_t>>{{5}, {4}, {3}, {2}, {1}, {0}});
  CHECK(layers_in(plan_of(sizes, {.bucket_bytes = 1200})) ==
        std::vector<std::vector<std::size_t>>{{5}, {4, 3, 2}, {1, 0}});
  // Without a size: 8·4·3e-4/8e-9 bytes are 1.2 MB, and the power of two below.
  CHECK(layers_in(plan_of({200'000, 100'000, 200'000})) ==
        std::vector<std::vector<std::size_t>>{{2, 1}, {0}});

  std::vector<layer_class> classes(6, layer_class::convolutional);
  classes[5] = classes[4] = layer_class::fully_connected;
  const plan typed(model_of(sizes), 4, reversed_order(6), classes,
                   {.bucket_bytes = 1'000'000, .choice = algorithm_choice::by_type()}, costs);
  CHECK(layers_in(typed) == std::vector<std::vector<std::size_t>>{{5, 4}, {3, 2, 1, 0}});
  CHECK(typed.buckets()[0].how == algorithm::ring);
  CHECK(typed.buckets()[1].how == algorithm::halving_doubling);
  CHECK(typed.bucket_of(2) == 1);
  CHECK(typed.buckets()[1].elements == 650);

  const plan cheap = plan_of({64, 1 << 20U}, {.bucket_bytes = 0, .choice = algorithm_choice::by_cost()});
  CHECK(cheap.buckets()[0].how == algorithm::ring);
  CHECK(cheap.buckets()[1].how == algorithm::pairwise);
  CHECK(plan_of({10, 0, 3}, {.bucket_bytes = 0}).buckets()[1].elements == 0);
}

// With chunks a bucket is several collectives: the latency of each counts.
TEST_CASE("plan: by_cost goes by the seconds of the chunks") {
  const auto made = [](std::size_t chunk_bytes) {
    return plan_of({1 << 18U}, {.chunk_bytes = chunk_bytes, .choice = algorithm_choice::by_cost()});
  };
  CHECK(made(std::size_t{4} << 20U).buckets()[0].how == algorithm::ring);
  CHECK(made(16'384).buckets()[0].how == algorithm::pairwise);
  for (const std::size_t chunk_bytes : {10'000U, 16'384U, 100'000U, 4U << 20U}) {
    const plan given = made(chunk_bytes);
    double least = std::numeric_limits<double>::infinity();
    double chosen = 0;
    for (const algorithm how : collectives::all_algorithms) {
      double seconds = 0;
      for (std::size_t begin = 0; begin < 1U << 18U; begin += given.chunk_elements()) {
        seconds += collectives::seconds_of(operation::all_reduce, how, 4,
                                           std::min(given.chunk_elements(), (1U << 18U) - begin), costs);
      }
      least = std::min(least, seconds);
      if (how == given.buckets()[0].how) chosen = seconds;
    }
    CHECK(chosen == Approx(least));
  }
}

TEST_CASE("plan: chunks are multiples of 16 elements a rank") {
  for (const std::size_t ranks : {1U, 3U, 4U, 7U}) {
    const plan made = plan_of({10}, {.chunk_bytes = 10'000}, ranks);
    CHECK(made.chunk_elements() % (16 * ranks) == 0);
    CHECK(made.chunk_elements() <= 2500);
    CHECK(made.chunk_elements() + 16 * ranks > 2500);
  }
}

TEST_CASE("plan: whatever decides the order of additions changes the fingerprint") {
  const std::vector<std::size_t> sizes = {100, 200, 300};
  const plan first = plan_of(sizes);
  CHECK(plan_of(sizes).fingerprint() == first.fingerprint());
  CHECK(plan_of(sizes, {.bucket_bytes = 0}).fingerprint() != first.fingerprint());
  CHECK(plan_of(sizes, {.chunk_bytes = 4096}).fingerprint() != first.fingerprint());
  CHECK(plan_of(sizes, {.choice = algorithm_choice::always(algorithm::ring)}).fingerprint() !=
        first.fingerprint());
  CHECK(plan_of(sizes, {}, 5).fingerprint() != first.fingerprint());
  CHECK(plan_of({100, 200, 301}).fingerprint() != first.fingerprint());
  const std::vector<layer_class> classes(3);
  const std::vector<std::size_t> order = {2, 0, 1};
  CHECK(plan(model_of(sizes), 4, order, classes, {}, costs).fingerprint() != first.fingerprint());
  // To the last digit of a cost.
  CHECK(plan(model_of(sizes), 4, reversed_order(3), classes, {},
             {std::nextafter(3e-4, 1.0), 8e-9, 1.6e-8, 2e-10})
            .fingerprint() != first.fingerprint());
}

TEST_CASE("plan: what cannot be is refused by name") {
  const lamina::layout model = model_of({10, 20});
  const std::vector<layer_class> classes(2);
  const auto refusal = [&](std::vector<std::size_t> order, std::size_t ranks = 2,
                           const collectives::plan_options& options = {}, const cost_table& table = costs) {
    return message_of<std::exception>([&] { plan(model, ranks, order, classes, options, table); });
  };
  CHECK(refusal({1, 1}) == "layer 'layer1' stands twice in the order");
  CHECK(refusal({1}) == "layer 'layer0' is missing in the order");
  CHECK(refusal({1, 2}) == "the order has layer 2, which there is not");
  CHECK(refusal({1, 0}, 0) == "a plan for no ranks");
  CHECK(refusal({1, 0}, 2, {.chunk_bytes = 4095}) == "chunks of 4095 bytes: at least 4096 are needed");
  CHECK(contains(refusal({1, 0}, 2, {}, {0, 1, 1, 1}), "the cost alpha is 0"));
  CHECK(contains(refusal({1, 0}, 2, {}, {1, 1, std::numeric_limits<double>::quiet_NaN(), 1}),
                 "beta_both_ways"));
  CHECK(message_of<std::invalid_argument>([&] {
          plan(model, 2, std::vector<std::size_t>{1, 0}, std::vector<layer_class>(3));
        }) == "there are 3 classes for 2 layers");
}
