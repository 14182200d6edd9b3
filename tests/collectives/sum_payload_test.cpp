// SPDX-License-Identifier: MIT
#include "lamina/collectives/sum.hpp"

#include <limits>
#include <random>
#include <tuple>

#include "catch.hpp"
#include "lamina/collectives/engine.hpp"
#include "rounded_sums.hpp"

using namespace lamina_test;
using collectives::algorithm;
using collectives::algorithm_choice;
using collectives::operation;
using lamina::payload_type;

namespace {

using namespace std::chrono_literals;

constexpr std::array halves = {payload_type::float16, payload_type::bfloat16};

// Of every size that floats have, and beyond what float16 has.
all_gradients wide_gradients(std::mt19937& random, const lamina::layout& model, std::size_t ranks) {
  all_gradients made = random_gradients(random, model, ranks);
  for (auto& of_rank : made) {
    for (auto& layer : of_rank) {
      for (float& each : layer) each = std::ldexp(each, static_cast<int>(below(random, 60)) - 40);
    }
  }
  return made;
}

// Bytes that a rank sends in the sum of one element in which plans are compared.
std::size_t opening_bytes(std::size_t ranks, std::size_t rank) {
  const auto rounds = rounds_of(operation::all_reduce, algorithm::pairwise, ranks, rank, 1);
  return 4 * sent(rounds).elements + 32 * sent(rounds).messages;
}

}  // namespace

TEST_CASE("sum payload: the bits of an independent sum, whatever is delayed and however layers are cut") {
  std::mt19937 random(3001);
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    const std::size_t ranks = below(random, 20) == 0 ? 9 + below(random, 10) : 1 + below(random, 5);
    const payload_type type = halves[below(random, 2)];
    const lamina::layout model = model_of({below(random, 70), 1 + below(random, 90), below(random, 3000)});
    const collectives::plan plan = plan_for(
        model, ranks, {.bucket_bytes = below(random, 2) * 400, .chunk_bytes = 4096, .payload = type});
    memory_network network(ranks, {.seed = seed, .most_delay = static_cast<unsigned>(below(random, 6))});
    auto engines = engines_over(network, plan, in_turn());
    const all_gradients gradients = wide_gradients(random, model, ranks);
    const std::vector<bool> is_sent = {below(random, 2) == 0, true, below(random, 4) != 0};
    run_step(engines, gradients, is_sent, random);
    const auto expected = rounded_means(type, gradients, is_sent);
    for (auto& each : engines) {
      if (!has_means(*each, expected))
        FAIL("other bits, seed " << seed << ", " << collectives::name_of(type) << ", " << ranks << " ranks");
    }
    REQUIRE(network.under_way() == 0);
  }
}

TEST_CASE("sum payload: half the bytes of elements, to the byte") {
  std::mt19937 random(3002);
  for (const payload_type type : collectives::all_sum_payloads) {
    for (const std::size_t ranks : {1U, 2U, 3U, 4U, 7U}) {
      const lamina::layout model = model_of({5000, 1, 0, 700, 2501});
      const collectives::plan plan =
          plan_for(model, ranks, {.bucket_bytes = 6000, .chunk_bytes = 4096, .payload = type});
      memory_network network(ranks);
      auto engines = engines_over(network, plan, in_turn());
      run_step(engines, random_gradients(random, model, ranks), std::vector<bool>(5, true), random);
      for (std::size_t r = 0; r < ranks; ++r) {
        std::size_t bytes = opening_bytes(ranks, r);
        for (const auto& bucket : plan.buckets()) {
          for (std::size_t begin = 0; begin < bucket.elements; begin += plan.chunk_elements()) {
            const std::size_t chunk = std::min(plan.chunk_elements(), bucket.elements - begin);
            const auto rounds = rounds_of(operation::all_reduce, algorithm::pairwise, ranks, r, chunk);
            bytes += (type == payload_type::as_is ? 4 : 2) *
                         formula_of_sent(algorithm::pairwise, ranks, r, chunk) +
                     32 * sent(rounds).messages;
          }
        }
        INFO(collectives::name_of(type) << ", rank " << r << " of " << ranks);
        CHECK(network.sent_bytes(r) == bytes);
        CHECK(engines[r]->totals().sent_bytes == bytes);
      }
    }
  }
}

TEST_CASE("sum payload: owners get sums that are not rounded, and hand parameters round as they are") {
  std::mt19937 random(3003);
  for (const payload_type type : halves) {
    for (const std::size_t ranks : {2U, 3U, 4U}) {
      const lamina::layout model = model_of({1200, 7, 1201});
      const collectives::plan plan =
          plan_for(model, ranks, {.bucket_bytes = 0, .chunk_bytes = 8192, .payload = type});
      memory_network network(ranks, {.seed = 5, .most_delay = 3});
      auto options = in_turn();
      options.update = [](std::size_t, std::size_t, std::span<float>) {};
      auto engines = engines_over(network, plan, options);
      const all_gradients gradients = wide_gradients(random, model, ranks);
      run_step(engines, gradients, std::vector<bool>(3, true), random);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        const std::vector<float> mean = rounded_mean(type, gradients, l, /*goes_back=*/false);
        for (auto& each : engines) CHECK(same_bits(each->parameters(l), mean));
      }
      // Each layer is one collective each way, of shards of one length: two bytes to the owner, four from it.
      std::size_t bytes = opening_bytes(ranks, 0);
      for (const std::size_t size : model.sizes())
        bytes += (ranks - 1) * (2 * 32 + (2 + 4) * ((size + ranks - 1) / ranks));
      CHECK(network.sent_bytes(0) == bytes);
    }
  }
}

TEST_CASE("sum payload: numbers that are none, or beyond the range") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const lamina::layout model = model_of({4});
  const auto means_of = [&](payload_type type, const std::vector<float>& first,
                            const std::vector<float>& second) {
    memory_network network(2);
    auto engines = engines_over(network, plan_for(model, 2, {.payload = type}), in_turn());
    std::mt19937 random(3004);
    run_step(engines, {{first}, {second}}, {true}, random);
    CHECK(same_bits(std::vector<float>(engines[0]->mean(0).begin(), engines[0]->mean(0).begin() + 3),
                    std::vector<float>(engines[1]->mean(0).begin(), engines[1]->mean(0).begin() + 3)));
    return std::vector<float>(engines[1]->mean(0).begin(), engines[1]->mean(0).end());
  };
  const std::vector<float> large =
      means_of(payload_type::float16, {1e6F, -1e6F, infinity, infinity}, {0, -1e6F, 1, -infinity});
  CHECK(large[0] == 65504 / 2.0F);
  CHECK(large[1] == -65504 / 2.0F);  // the sum of two of the largest is cut once more on its way back
  CHECK(large[2] == infinity);
  CHECK(std::isnan(large[3]));
  const float most = std::numeric_limits<float>::max();
  const std::vector<float> most_of_all =
      means_of(payload_type::bfloat16, {most, 1, 0, std::nanf("")}, {0, 0x1p-9F, 0, 1});
  CHECK(most_of_all[0] == 0x1.fep127F / 2);
  CHECK(most_of_all[1] == 0.5F);  // 1 + 2^-9 has no bfloat16 of its own
  CHECK(std::isnan(most_of_all[3]));
}

TEST_CASE("sum payload: it is in the plan, and refused by name where it cannot be") {
  const lamina::layout model = model_of({100, 50});
  const auto plan_with = [&](payload_type type,
                             algorithm_choice choice = algorithm_choice::always(algorithm::pairwise)) {
    return plan_for(model, 3, {.bucket_bytes = 0, .choice = choice, .payload = type});
  };
  const collectives::plan as_is = plan_with(payload_type::as_is);
  for (const payload_type type : halves) {
    const collectives::plan made = plan_with(type);
    CHECK(made.fingerprint() != as_is.fingerprint());
    CHECK(made.payload_of(operation::all_reduce) == type);
    CHECK(made.payload_of(operation::all_gather) == payload_type::as_is);
  }
  CHECK(plan_with(payload_type::float16).fingerprint() != plan_with(payload_type::bfloat16).fingerprint());
  const auto refusal = [&](payload_type type, algorithm_choice choice) {
    return message_of<std::invalid_argument>([&] { plan_with(type, choice); });
  };
  for (const algorithm how : collectives::all_algorithms) {
    CHECK(refusal(payload_type::bfloat16, algorithm_choice::always(how)) ==
          (how == algorithm::pairwise ? "(no exception)"
                                      : std::string("sums travel as bfloat16 by pairwise alone, not by ") +
                                            collectives::name_of(how)));
  }
  CHECK(refusal(payload_type::int8, algorithm_choice::always(algorithm::pairwise)) ==
        "sums travel as_is, as float16 or as bfloat16, not as payload 3");
  CHECK(contains(refusal(payload_type::float16, algorithm_choice::by_type()), "by pairwise alone"));

  memory_network network(2);
  collectives::executor::memory memory;
  collectives::executor executor(network.of(0), 7, 100, memory);
  std::vector<float> elements(100);
  CHECK(message_of<std::logic_error>([&] {
          executor.start({.how = algorithm::ring, .payload = payload_type::bfloat16, .elements = elements});
        }) == "ring has no payload bfloat16");
}

TEST_CASE("sum payload: another payload on a rank is another plan, and nobody hangs") {
  const lamina::layout model = model_of({3000});
  memory_network network(3);
  const auto errors = in_threads(3, [&](std::size_t r) {
    const payload_type own = r == 1 ? payload_type::bfloat16 : payload_type::as_is;
    collectives::engine engine(network.of(r), plan_for(model, 3, {.payload = own}), {.timeout = 10s});
    engine.begin_step();
    engine.ready(0, std::vector<float>(3000, 1.0F));
    engine.drain();
  });
  CHECK(std::ranges::any_of(
      errors, [](const auto& each) { return contains(each, "rank 1 was started with another plan"); }));
  for (const std::string& each : errors)
    CHECK((contains(each, "another plan") || contains(each, "has left")));
}
