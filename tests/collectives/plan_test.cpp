// SPDX-License-Identifier: MIT
#include "lamina/collectives/plan.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "catch.hpp"
#include "simulated_ranks.hpp"

using namespace lamina_test;
using collectives::algorithm;
using collectives::algorithm_choice;
using collectives::layer_class;
using collectives::plan;

namespace {

std::vector<std::size_t> reversed_order(std::size_t layers) {
  std::vector<std::size_t> order(layers);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return order;
}

plan plan_of(const std::vector<std::size_t>& sizes, const collectives::plan_options& options = {},
             std::size_t ranks = 4) {
  return plan(model_of(sizes), ranks, reversed_order(sizes.size()),
              std::vector<layer_class>(sizes.size(), layer_class::convolutional), options);
}

std::vector<std::vector<std::size_t>> layers_in(const plan& given) {
  std::vector<std::vector<std::size_t>> all;
  for (const auto& each : given.buckets()) all.push_back(each.layers);
  return all;
}

}  // namespace

TEST_CASE("plan: buckets are of consecutive layers of one class, in the order in which they become ready") {
  const std::vector<std::size_t> sizes = {100, 200, 300, 50, 50, 1000};
  CHECK(layers_in(plan_of(sizes, {.bucket_bytes = 0})) ==
        std::vector<std::vector<std::size_t>>{{5}, {4}, {3}, {2}, {1}, {0}});
  CHECK(layers_in(plan_of(sizes, {.bucket_bytes = 1200})) ==
        std::vector<std::vector<std::size_t>>{{5}, {4, 3, 2}, {1, 0}});
  // Without a size: 8·4·36 kB are 1.2 MB, and the power of two below.
  CHECK(layers_in(plan_of({200'000, 100'000, 200'000})) ==
        std::vector<std::vector<std::size_t>>{{2, 1}, {0}});

  std::vector<layer_class> classes(6, layer_class::convolutional);
  classes[5] = classes[4] = layer_class::fully_connected;
  const plan typed(model_of(sizes), 4, reversed_order(6), classes,
                   {.bucket_bytes = 1'000'000, .choice = algorithm_choice::by_type()});
  CHECK(layers_in(typed) == std::vector<std::vector<std::size_t>>{{5, 4}, {3, 2, 1, 0}});
  CHECK(typed.buckets()[0].how == algorithm::ring);
  CHECK(typed.buckets()[1].how == algorithm::halving_doubling);
  CHECK(typed.bucket_of(2) == 1);
  CHECK(typed.buckets()[1].elements == 650);

  CHECK(plan_of({10, 0, 3}, {.bucket_bytes = 0}).buckets()[1].elements == 0);
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
  CHECK(plan(model_of(sizes), 4, order, classes).fingerprint() != first.fingerprint());
}

TEST_CASE("plan: what cannot be is refused by name") {
  const lamina::layout model = model_of({10, 20});
  const std::vector<layer_class> classes(2);
  const auto refusal = [&](std::vector<std::size_t> order, std::size_t ranks = 2,
                           const collectives::plan_options& options = {}) {
    return message_of<std::exception>([&] { plan(model, ranks, order, classes, options); });
  };
  CHECK(refusal({1, 1}) == "layer 'layer1' stands twice in the order");
  CHECK(refusal({1}) == "layer 'layer0' is missing in the order");
  CHECK(refusal({1, 2}) == "the order has layer 2, which there is not");
  CHECK(refusal({1, 0}, 0) == "a plan for no ranks");
  CHECK(refusal({1, 0}, 2, {.chunk_bytes = 4095}) == "chunks of 4095 bytes: at least 4096 are needed");
  CHECK(message_of<std::invalid_argument>([&] {
          plan(model, 2, std::vector<std::size_t>{1, 0}, std::vector<layer_class>(3));
        }) == "there are 3 classes for 2 layers");
}
