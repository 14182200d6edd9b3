// SPDX-License-Identifier: MIT
// Schedules and plans as data. That they sum what they should, the engines say that run them.
#include "lamina/collectives/schedule.hpp"

#include "catch.hpp"
#include "lamina/collectives/plan.hpp"
#include "ranks.hpp"

namespace lamina_test::schedule_test {

using collectives::algorithm_choice;
using collectives::layer_class;
using collectives::plan;

namespace {

plan plan_of(const std::vector<std::size_t>& sizes, const collectives::plan_options& options = {},
             std::size_t ranks = 4) {
  return plan_for(model_of(sizes), ranks, options);
}

std::vector<std::vector<std::size_t>> layers_in(const plan& given) {
  std::vector<std::vector<std::size_t>> all;
  for (const auto& each : given.buckets()) all.push_back(each.layers);
  return all;
}

}  // namespace

TEST_CASE("schedule: shards stay right where the product of elements and ranks overflows") {
  const std::size_t elements = std::numeric_limits<std::size_t>::max() / 3;
  std::size_t end = 0;
  for (std::size_t r = 0; r < 7; ++r) {
    const auto own = collectives::owned_elements(algorithm::pairwise, 7, r, elements);
    CHECK(own.begin == end);
    CHECK(own.size() - elements / 7 <= 1);
    end = own.end;
  }
  CHECK(end == elements);
  CHECK(message_of<std::out_of_range>([] {
          std::ignore = rounds_of(operation::all_reduce, algorithm::ring, 4, 4, 10);
        }) == "rank 4 is out of range: there are 4 ranks");
}

TEST_CASE("schedule: the rounds of each half of a pairwise sum are under way together, eight at most") {
  for (const algorithm how : collectives::all_algorithms) {
    std::string together;
    for (const auto& each : rounds_of(operation::all_reduce, how, 12, 3, 1200))
      together += each.joins ? '+' : '|';
    CHECK((together.find('+') != std::string::npos) == (how == algorithm::pairwise));
    if (how == algorithm::pairwise) CHECK(together == "|+++++++|++|+++++++|++");
  }
}

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
  const plan typed(model_of(sizes), 4, std::vector<std::size_t>{5, 4, 3, 2, 1, 0}, classes,
                   {.bucket_bytes = 1'000'000, .choice = algorithm_choice::by_type()});
  CHECK(layers_in(typed) == std::vector<std::vector<std::size_t>>{{5, 4}, {3, 2, 1, 0}});
  CHECK(typed.buckets()[0].how == algorithm::ring);
  CHECK(typed.buckets()[1].how == algorithm::halving_doubling);
  CHECK(typed.bucket_of(2) == 1);
  CHECK(typed.buckets()[1].elements == 650);
  CHECK(plan_of({10, 0, 3}, {.bucket_bytes = 0}).buckets()[1].elements == 0);

  for (const std::size_t ranks : {1U, 3U, 4U, 7U}) {
    const plan made = plan_of({10}, {.chunk_bytes = 10'000}, ranks);
    CHECK(made.chunk_elements() % (16 * ranks) == 0);
    CHECK(made.chunk_elements() <= 2500);
    CHECK(made.chunk_elements() + 16 * ranks > 2500);
  }
}

TEST_CASE("plan: whatever decides the order of additions changes the fingerprint") {
  const std::vector<std::size_t> sizes = {100, 200, 300};
  const auto pairwise = [](payload_type type) {
    return collectives::plan_options{.choice = algorithm_choice::always(algorithm::pairwise),
                                     .payload = type};
  };
  const plan first = plan_of(sizes, pairwise(payload_type::as_is));
  CHECK(plan_of(sizes, pairwise(payload_type::as_is)).fingerprint() == first.fingerprint());
  const std::vector<std::size_t> order = {2, 0, 1};
  const std::vector others = {
      plan_of(sizes, {.bucket_bytes = 0}),
      plan_of(sizes, {.chunk_bytes = 4096}),
      plan_of(sizes, {.choice = algorithm_choice::always(algorithm::ring)}),
      plan_of(sizes, pairwise(payload_type::as_is), 5),
      plan_of({100, 200, 301}, pairwise(payload_type::as_is)),
      plan(model_of(sizes), 4, order, std::vector<layer_class>(3), pairwise(payload_type::as_is)),
      plan_of(sizes, pairwise(payload_type::float16)),
      plan_of(sizes, pairwise(payload_type::bfloat16))};
  std::vector<std::uint64_t> fingerprints = {first.fingerprint()};
  for (const plan& each : others) {
    CHECK(std::ranges::find(fingerprints, each.fingerprint()) == fingerprints.end());
    fingerprints.push_back(each.fingerprint());
  }
  CHECK(others.back().payload_of(operation::all_reduce) == payload_type::bfloat16);
  CHECK(others.back().payload_of(operation::all_gather) == payload_type::as_is);
}

TEST_CASE("plan: what cannot be is refused by name") {
  const auto refusal = [](const std::vector<std::size_t>& order, std::size_t ranks = 2,
                          const collectives::plan_options& options = {}, std::size_t classes = 2) {
    return message_of<std::exception>([&] {
      plan(model_of({10, 20}), ranks, order, std::vector<layer_class>(classes), options);
    });
  };
  CHECK(refusal({1, 1}) == "layer 'layer1' stands twice in the order");
  CHECK(refusal({1}) == "layer 'layer0' is missing in the order");
  CHECK(refusal({1, 2}) == "the order has layer 2, which there is not");
  CHECK(refusal({1, 0}, 0) == "a plan for no ranks");
  CHECK(refusal({1, 0}, 2, {.chunk_bytes = 4095}) == "chunks of 4095 bytes: at least 4096 are needed");
  CHECK(refusal({1, 0}, 2, {}, 3) == "there are 3 classes for 2 layers");
  const auto payload_refusal = [&](payload_type type, algorithm_choice choice) {
    return refusal({1, 0}, 2, {.choice = choice, .payload = type});
  };
  CHECK(payload_refusal(payload_type::bfloat16, algorithm_choice::always(algorithm::ring)) ==
        "sums travel as bfloat16 by pairwise alone, not by ring");
  CHECK(payload_refusal(payload_type::int8, algorithm_choice::always(algorithm::pairwise)) ==
        "sums travel as_is, as float16 or as bfloat16, not as payload 3");
  CHECK(contains(payload_refusal(payload_type::float16, algorithm_choice::by_type()), "by pairwise alone"));
}

}  // namespace lamina_test::schedule_test
