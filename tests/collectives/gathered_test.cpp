// SPDX-License-Identifier: MIT
// Layers that are gathered and not summed: each rank hands its slice over, and all get all.
#include <chrono>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"
#include "lamina/collectives/engine.hpp"
#include "memory_ranks.hpp"

using namespace lamina_test;
using collectives::algorithm;
using collectives::algorithm_choice;
using collectives::engine;
using collectives::engine_options;
using collectives::layer_class;
using collectives::memory_network;
using collectives::operation;
using collectives::task;
using namespace std::chrono_literals;

namespace {

// Of five layers the second and the third are gathered; the order in which they are ready is from the last on.
const std::vector<layer_class> classes = {layer_class::convolutional, layer_class::gathered,
                                          layer_class::gathered, layer_class::fully_connected,
                                          layer_class::convolutional};
const std::vector<std::size_t> order = {4, 3, 2, 1, 0};
constexpr std::size_t layers = 5;

bool is_gathered(std::size_t layer) {
  return classes[layer] == layer_class::gathered;
}

// What each rank hands over: a slice of what is gathered.
all_gradients handed_over(std::mt19937& random, const lamina::layout& model, std::size_t ranks) {
  all_gradients made(ranks);
  for (auto& of_rank : made) {
    for (std::size_t l = 0; l < layers; ++l)
      of_rank.push_back(random_fractions<float>(random, model.sizes()[l] / (is_gathered(l) ? ranks : 1)));
  }
  return made;
}

std::vector<float> one_behind_the_other(const all_gradients& gradients, std::size_t layer) {
  std::vector<float> all;
  for (const auto& each : gradients) all.insert(all.end(), each[layer].begin(), each[layer].end());
  return all;
}

}  // namespace

TEST_CASE("gathered: all ranks get all slices as they are, whatever is delayed, held back and cut") {
  std::mt19937 random(81);
  std::size_t chunked = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const std::size_t ranks = 1 + below(random, 8);
    const algorithm how = std::vector{algorithm::pairwise, algorithm::ring}[below(random, 2)];
    const bool has_owners = below(random, 2) == 0;
    INFO("seed " << seed << ", " << ranks << " ranks, sums by " << collectives::name_of(how)
                 << (has_owners ? ", owners" : ""));
    const lamina::layout model = model_of({90, ranks * below(random, 900), ranks * below(random, 2000),
                                           1 + below(random, 300), below(random, 9)});
    const collectives::plan plan(model, ranks, order, classes,
                                 {.bucket_bytes = below(random, 2) * 6000,
                                  .chunk_bytes = 4096,
                                  .choice = algorithm_choice::always(how)});
    chunked += model.sizes()[2] > plan.chunk_elements() ? 1 : 0;
    memory_network network(ranks, {.seed = seed, .most_delay = static_cast<unsigned>(below(random, 6))});
    std::vector<std::unique_ptr<engine>> engines;
    for (std::size_t r = 0; r < ranks; ++r) {
      engine_options options = in_turn();
      // Parameters are the mean itself, so that owners and sums end alike.
      if (has_owners) {
        options.update = [](std::size_t layer, std::size_t, std::span<float>) {
          if (is_gathered(layer)) throw std::logic_error("an owner updates what is gathered");
        };
      }
      engines.push_back(std::make_unique<engine>(network.of(r), plan, options));
    }
    for (int step = 0; step < 3; ++step) {
      const all_gradients gradients = handed_over(random, model, ranks);
      std::vector<bool> is_sent(layers);
      for (std::size_t l = 0; l < layers; ++l) is_sent[l] = below(random, 4) != 0;
      run_step(engines, gradients, is_sent, random);
      for (auto& each : engines) {
        for (std::size_t l = 0; l < layers; ++l) {
          const std::vector<float> expected = !is_sent[l]      ? std::vector<float>()
                                              : is_gathered(l) ? one_behind_the_other(gradients, l)
                                                               : mean_by_slices(how, gradients, l);
          const auto found = is_gathered(l) ? each->gathered(l)
                             : has_owners   ? each->parameters(l)
                                            : each->mean(l);
          if (!is_gathered(l) && !has_owners && how != algorithm::pairwise) continue;  // added in chunks
          REQUIRE(same_bits(found, expected));
        }
      }
    }
  }
  CHECK(chunked > 20);
}

TEST_CASE("gathered: each rank sends its slice to each other, and no more") {
  for (const std::size_t ranks : {1U, 2U, 3U, 4U, 7U}) {
    const lamina::layout model = model_of({0, 300 * ranks, 1500 * ranks, 0, 0});
    const collectives::plan plan(
        model, ranks, order, classes,
        {.bucket_bytes = 0, .chunk_bytes = 4096, .choice = algorithm_choice::by_cost()});
    memory_network network(ranks);
    engine_options options;
    options.progress = collectives::progress_by::caller;
    auto engines = engines_over(network, plan, options);
    std::mt19937 random(3);
    run_step(engines, handed_over(random, model, ranks), std::vector<bool>(layers, true), random);
    for (std::size_t r = 0; r < ranks; ++r) {
      const auto opening =
          collectives::sent(collectives::rounds_of(operation::all_reduce, algorithm::pairwise, ranks, r, 1));
      std::uint64_t bytes = 4 * opening.elements + 32 * opening.messages;
      for (std::size_t elements : {300 * ranks, 1500 * ranks}) {
        while (elements > 0) {
          const std::size_t chunk = std::min(elements, plan.chunk_elements());
          bytes += (ranks - 1) * (4 * (chunk / ranks) + 32);
          elements -= chunk;
        }
      }
      CHECK(network.sent_bytes(r) == bytes);
    }
  }
}

TEST_CASE("gathered: one task a bucket, beside owners too, and seconds of a gather") {
  const lamina::layout model = model_of({25'000, 12'000, 13'000, 25'000, 25'000});
  // A byte takes 10 us, so that the gather of 25,000 elements over two ranks takes half a second, and a sum a second.
  const collectives::cost_table costs = {
      .alpha = 1e-9, .beta_one_way = 1e-5, .beta_both_ways = 1e-5, .gamma = 1e-12};
  const collectives::plan plan(
      model, 2, order, classes,
      {.bucket_bytes = 1'000'000, .choice = algorithm_choice::always(algorithm::ring)}, costs);
  REQUIRE(plan.buckets().size() == 4);
  CHECK(plan.buckets()[2].is_gathered);
  CHECK(plan.buckets()[2].how == algorithm::pairwise);
  CHECK(plan.buckets()[2].layers == std::vector<std::size_t>{2, 1});
  CHECK(plan.seconds_of(plan.buckets()[2]) == Approx(0.5).epsilon(1e-3));
  CHECK(plan.seconds_of(plan.buckets()[0]) == Approx(1).epsilon(1e-3));
  CHECK(plan.tasks() == std::vector<task>{{0, operation::all_reduce},
                                          {1, operation::all_reduce},
                                          {2, operation::all_gather},
                                          {3, operation::all_reduce}});
  const std::vector<task> of_owners(plan.tasks_of_owners().begin(), plan.tasks_of_owners().end());
  CHECK(of_owners == std::vector<task>{{0, operation::reduce_scatter},
                                       {1, operation::reduce_scatter},
                                       {2, operation::all_gather},
                                       {3, operation::reduce_scatter},
                                       {3, operation::all_gather},
                                       {1, operation::all_gather},
                                       {0, operation::all_gather}});
  // Three sums of a second and a gather of half one.
  double seconds = 0;
  for (const task& each : plan.tasks()) seconds += plan.seconds_of(each);
  CHECK(seconds == Approx(3.5).epsilon(1e-3));
  CHECK(plan.handed_over(2) == 6'500);
  CHECK(plan.handed_over(3) == 25'000);

  const auto loaded = collectives::plan::load(plan.save(), model, 2);
  CHECK(loaded.fingerprint() == plan.fingerprint());
  CHECK(loaded.buckets()[2].is_gathered);
  CHECK(loaded.tasks() == plan.tasks());
  CHECK(contains(plan.table(), "gathered"));
}

TEST_CASE("gathered: activations are fewer bytes than a gradient for a small batch alone") {
  using collectives::gathers_less;
  // VGG-16's first fully connected layer, four ranks with 32 images each: 11 MB in place of 617.
  CHECK(gathers_less(32, 25088, 4096, 4));
  CHECK_FALSE(gathers_less(32, 64, 10, 4));
  // 4·(6 + 3)·1 elements against 2·6·3·1/2: equal at one row of two ranks.
  CHECK_FALSE(gathers_less(2, 6, 3, 2));
  CHECK(gathers_less(1, 6, 3, 2));
  CHECK_FALSE(gathers_less(2, 8, 4, 3));
}

TEST_CASE("gathered: what cannot be is refused by name") {
  const lamina::layout model = model_of({10, 10, 9, 10, 10});
  CHECK(
      contains(message_of<std::invalid_argument>([&] { (void)collectives::plan(model, 2, order, classes); }),
               "layer 'layer2' is gathered, and its 9 elements are not 2 slices of one length"));
  const lamina::layout even = model_of({10, 10, 8, 10, 10});
  const collectives::plan plan(even, 2, order, classes, {.bucket_bytes = 0});
  memory_network network(2);
  engine one(network.of(0), plan, in_turn());
  one.begin_step();
  const std::vector<float> values(10);
  const auto refused = [&](auto&& call) { return message_of<std::invalid_argument>(call); };
  CHECK(contains(refused([&] { one.ready(2, std::span(values).first(8)); }),
                 "is gathered in slices of 4 elements, not of 8"));
  CHECK(contains(refused([&] { one.ready(0, std::span(values).first(5)); }), "layer0"));
  CHECK(contains(message_of<std::logic_error>([&] { (void)one.mean(1); }), "is gathered and has no mean"));
  CHECK(contains(message_of<std::logic_error>([&] { (void)one.parameters(1); }),
                 "is gathered and has no owners"));
  CHECK(contains(message_of<std::logic_error>([&] { (void)one.gathered(0); }), "is summed, not gathered"));
  CHECK(contains(message_of<std::logic_error>([&] { (void)one.gathered(1); }), "is not summed yet"));
}

TEST_CASE("gathered: ranks with slices of different lengths notice it before anything is taken") {
  std::vector<std::string> errors = [] {
    memory_network network(2);
    return in_threads(2, [&](std::size_t r) {
      // A batch of 3 rows here, of 4 there.
      const lamina::layout model = model_of({10, (3 + r) * 20, 8, 10, 10});
      engine own(network.of(r), collectives::plan(model, 2, order, classes), {.timeout = 2s});
      own.begin_step();
      for (std::size_t l = 0; l < layers; ++l)
        own.ready(l, std::vector<float>(model.sizes()[l] / (is_gathered(l) ? 2 : 1)));
      own.drain();
    });
  }();
  CHECK(contains(errors[0] + errors[1], "plan"));
}
