// SPDX-License-Identifier: MIT
// Owners: each updates its shards alone, and hands the new parameters round.
#include <array>
#include <bit>
#include <chrono>
#include <limits>
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
using namespace std::chrono_literals;

namespace {

constexpr std::array halves = {algorithm::pairwise, algorithm::ring, algorithm::halving_doubling};

bool leaves_shards(algorithm how, std::size_t ranks) {
  return how != algorithm::halving_doubling || std::has_single_bit(ranks);
}

// x <- x - rate·v with v <- 0.9·v + mean.
void momentum_step(float& parameter, float& velocity, float mean) {
  velocity = 0.9F * velocity + mean;
  parameter -= 0.1F * velocity;
}

// What owners hold: all parameters, and the velocity of what they own.
struct replica {
  std::vector<std::vector<float>> parameters;
  std::vector<std::vector<float>> velocity;
  std::vector<std::vector<int>> updated;  // how often this rank has updated each element

  explicit replica(const lamina::layout& model) {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::size_t size = model.sizes()[l];
      std::vector<float> first(size);
      for (std::size_t i = 0; i < size; ++i) first[i] = static_cast<float>(i % 7) - 3 + static_cast<float>(l);
      parameters.push_back(first);
      velocity.emplace_back(size);
      updated.emplace_back(size);
    }
  }
  collectives::owner_update update() {
    return [this](std::size_t layer, std::size_t begin, std::span<float> mean) {
      for (std::size_t k = 0; k < mean.size(); ++k) {
        float next = parameters[layer][begin + k];
        momentum_step(next, velocity[layer][begin + k], mean[k]);
        mean[k] = next;
        ++updated[layer][begin + k];
      }
    };
  }
  void take(engine& from) {
    for (std::size_t l = 0; l < parameters.size(); ++l) {
      const auto arrived = from.parameters(l);
      if (!arrived.empty()) std::ranges::copy(arrived, parameters[l].begin());
    }
  }
};

engine_options with_update(collectives::owner_update update) {
  engine_options options = in_turn();
  options.update = std::move(update);
  return options;
}

}  // namespace

// The fourth oracle, and the eighth: whatever is delayed, held back, and cut into chunks.
TEST_CASE("owners: all ranks have what one would have that updates everything, and a P-th of its velocity") {
  std::mt19937 random(77);
  std::size_t chunked = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const std::size_t ranks = 1 + below(random, 8);
    const auto how = halves[below(random, 3)];
    if (!leaves_shards(how, ranks)) continue;
    INFO("seed " << seed << ", " << collectives::name_of(how) << ", " << ranks << " ranks");
    const lamina::layout model =
        model_of({below(random, 6), 1 + below(random, 90), below(random, 5000), 300, below(random, 9)});
    const collectives::plan_options planned = {
        .bucket_bytes = below(random, 2) * 800, .chunk_bytes = 4096, .choice = algorithm_choice::always(how)};
    const collectives::plan plan = plan_for(model, ranks, planned);
    chunked += model.sizes()[2] > plan.chunk_elements() ? 1 : 0;
    memory_network network(ranks, {.seed = seed, .most_delay = static_cast<unsigned>(below(random, 6))});
    std::vector<replica> replicas(ranks, replica(model));
    std::vector<std::unique_ptr<engine>> engines;
    for (std::size_t r = 0; r < ranks; ++r)
      engines.push_back(std::make_unique<engine>(network.of(r), plan, with_update(replicas[r].update())));
    replica dense(model);
    std::vector<std::vector<int>> steps_of;
    for (const std::size_t size : model.sizes()) steps_of.emplace_back(size);
    for (int step = 0; step < 4; ++step) {
      const all_gradients gradients = random_gradients(random, model, ranks);
      std::vector<bool> is_sent(model.layers());
      for (std::size_t l = 0; l < model.layers(); ++l) is_sent[l] = below(random, 3) != 0;
      run_step(engines, gradients, is_sent, random);
      for (std::size_t r = 0; r < ranks; ++r) replicas[r].take(*engines[r]);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        if (!is_sent[l]) continue;
        const std::vector<float> mean = mean_by_shards(how, gradients, l);
        for (std::size_t i = 0; i < mean.size(); ++i) {
          momentum_step(dense.parameters[l][i], dense.velocity[l][i], mean[i]);
          ++steps_of[l][i];
        }
        for (const replica& each : replicas) REQUIRE(same_bits(each.parameters[l], dense.parameters[l]));
      }
    }
    // Each element has one owner, the same in every step whatever else was sent, and its velocity is there alone.
    for (std::size_t l = 0; l < model.layers(); ++l) {
      for (std::size_t i = 0; i < model.sizes()[l]; ++i) {
        std::size_t owners = 0;
        for (const replica& each : replicas) {
          if (each.updated[l][i] == 0) continue;
          ++owners;
          REQUIRE(each.updated[l][i] == steps_of[l][i]);
          REQUIRE(each.velocity[l][i] == dense.velocity[l][i]);
        }
        REQUIRE(owners == (steps_of[l][i] > 0 ? 1U : 0U));
      }
      for (const replica& each : replicas) {
        const auto own = std::ranges::count_if(each.updated[l], [](int count) { return count > 0; });
        REQUIRE(static_cast<std::size_t>(own) <= (model.sizes()[l] + ranks - 1) / ranks);
      }
    }
  }
  CHECK(chunked > 20);
}

TEST_CASE("owners: by pairwise sums the parameters are those of a plain all-reduce, bit for bit") {
  std::mt19937 random(78);
  for (const std::size_t ranks : {2U, 3U, 4U, 8U}) {
    const lamina::layout model = model_of({1000, 3, 0, 2500});
    const collectives::plan plan = plan_for(model, ranks, {.bucket_bytes = 3000, .chunk_bytes = 4096});
    memory_network of_owners(ranks);
    memory_network of_sums(ranks);
    std::vector<replica> replicas(ranks, replica(model));
    replica by_sums(model);
    std::vector<std::unique_ptr<engine>> owners;
    for (std::size_t r = 0; r < ranks; ++r)
      owners.push_back(std::make_unique<engine>(of_owners.of(r), plan, with_update(replicas[r].update())));
    auto sums = engines_over(of_sums, plan, in_turn());
    for (int step = 0; step < 5; ++step) {
      const all_gradients gradients = random_gradients(random, model, ranks);
      run_step(owners, gradients, std::vector<bool>(4, true), random);
      run_step(sums, gradients, std::vector<bool>(4, true), random);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        const auto mean = sums[0]->mean(l);
        for (std::size_t i = 0; i < mean.size(); ++i)
          momentum_step(by_sums.parameters[l][i], by_sums.velocity[l][i], mean[i]);
      }
      for (std::size_t r = 0; r < ranks; ++r) {
        replicas[r].take(*owners[r]);
        for (std::size_t l = 0; l < model.layers(); ++l)
          REQUIRE(same_bits(replicas[r].parameters[l], by_sums.parameters[l]));
      }
    }
  }
}

// The sixth oracle. A layer has P shards of equal length: less than P elements more than it has.
TEST_CASE("owners: bytes by the formula") {
  for (const algorithm how : halves) {
    for (const std::size_t ranks : {1U, 2U, 3U, 4U, 7U}) {
      if (!leaves_shards(how, ranks)) continue;
      const lamina::layout model = model_of({5000, 1, 0, 701});
      const collectives::plan plan = plan_for(
          model, ranks, {.bucket_bytes = 0, .chunk_bytes = 4096, .choice = algorithm_choice::always(how)});
      memory_network network(ranks);
      replica unused(model);
      std::vector<std::unique_ptr<engine>> engines;
      for (std::size_t r = 0; r < ranks; ++r)
        engines.push_back(std::make_unique<engine>(network.of(r), plan, with_update(unused.update())));
      std::mt19937 random(3);
      run_step(engines, random_gradients(random, model, ranks), {true, true, true, false}, random);
      for (std::size_t r = 0; r < ranks; ++r) {
        const auto opening =
            sent(rounds_of(collectives::operation::all_reduce, algorithm::pairwise, ranks, r, 1));
        std::uint64_t bytes = 4 * opening.elements + 32 * opening.messages;
        for (const std::size_t elements : {5000U, 1U}) {
          std::size_t left = (elements + ranks - 1) / ranks * ranks;
          while (left > 0) {
            const std::size_t chunk = std::min(left, plan.chunk_elements());
            // Each half sends all shards but one.
            const std::size_t rounds = how == algorithm::halving_doubling
                                           ? static_cast<std::size_t>(std::countr_zero(ranks))
                                           : ranks - 1;
            bytes += 2 * (4 * (chunk / ranks * (ranks - 1)) + 32 * rounds);
            left -= chunk;
          }
        }
        CHECK(network.sent_bytes(r) == bytes);
      }
    }
  }
}

// The seventh oracle: the parameters that forward needs first are there while others are still on their way.
TEST_CASE("owners: the first layers come first, and forward begins while the last are open") {
  const std::size_t ranks = 3;
  const lamina::layout model = model_of({50, 60, 70});
  const collectives::plan plan = plan_for(model, ranks, {.bucket_bytes = 0});
  memory_network network(ranks);
  std::vector<replica> replicas(ranks, replica(model));
  std::vector<std::unique_ptr<engine>> engines;
  for (std::size_t r = 0; r < ranks; ++r)
    engines.push_back(std::make_unique<engine>(network.of(r), plan, with_update(replicas[r].update())));
  std::mt19937 random(4);
  const all_gradients gradients = random_gradients(random, model, ranks);
  for (auto& each : engines) each->begin_step();
  for (const std::size_t l : {2U, 1U}) {
    for (std::size_t r = 0; r < ranks; ++r) engines[r]->ready(l, gradients[r][l]);
  }
  for (int k = 0; k < 1000; ++k) {
    for (auto& each : engines) each->poll();
  }
  // All that is there is summed; parameters come once all is.
  CHECK(replicas[0].updated[2][0] == 1);
  CHECK_FALSE(engines[0]->is_done(2));
  for (std::size_t r = 0; r < ranks; ++r) engines[r]->ready(0, gradients[r][0]);
  std::vector<std::size_t> order;
  while (order.size() < 3) {
    for (auto& each : engines) each->poll();
    for (std::size_t l = 0; l < 3; ++l) {
      if (engines[0]->is_done(l) && std::ranges::find(order, l) == order.end()) order.push_back(l);
    }
    if (order.size() == 1) {
      // The next forward may read the first layer now.
      CHECK_FALSE(engines[0]->is_done(2));
      CHECK(engines[0]->parameters(0).size() == 50);
      CHECK(contains(message_of<std::logic_error>([&] { (void)engines[0]->parameters(2); }),
                     "is not summed yet"));
    }
  }
  CHECK(order == std::vector<std::size_t>{0, 1, 2});
}

TEST_CASE("owners: what cannot be is refused by name") {
  const lamina::layout model = model_of({50, 60});
  memory_network network(3);
  const auto made = [&](algorithm how) {
    return message_of<std::invalid_argument>([&] {
      const collectives::plan plan = plan_for(model, 3, {.choice = algorithm_choice::always(how)});
      const engine one(network.of(0), plan, with_update([](std::size_t, std::size_t, std::span<float>) {}));
    });
  };
  CHECK(contains(made(algorithm::halving_doubling),
                 "halving_doubling over 3 ranks does not leave a shard to each of them"));
  CHECK_NOTHROW(engine(network.of(0),
                       plan_for(model, 3, {.choice = algorithm_choice::always(algorithm::ring)}),
                       with_update([](std::size_t, std::size_t, std::span<float>) {})));

  memory_network one_rank(1);
  const collectives::plan plan = plan_for(model, 1, {});
  engine sums(one_rank.of(0), plan, in_turn());
  CHECK(contains(message_of<std::logic_error>([&] { (void)sums.parameters(0); }),
                 "has no owners: options.update is empty"));
  memory_network other_rank(1);
  engine owner(other_rank.of(0), plan, with_update([](std::size_t, std::size_t, std::span<float>) {}));
  CHECK(contains(message_of<std::logic_error>([&] { (void)owner.mean(1); }),
                 "has its mean with its owners alone"));
}

TEST_CASE("owners: a rank without them is named, and an update that throws ends the engine") {
  const lamina::layout model = model_of({50, 60});
  const collectives::plan plan = plan_for(model, 2, {.bucket_bytes = 0});
  const std::vector<float> gradient(60, 1.0F);
  const auto run = [&](const collectives::owner_update& of_first,
                       const collectives::owner_update& of_second) {
    memory_network network(2);
    return in_threads(2, [&](std::size_t r) {
      engine own(network.of(r), plan, {.timeout = 2s, .update = r == 0 ? of_first : of_second});
      own.begin_step();
      own.ready(1, gradient);
      own.ready(0, std::span(gradient).first(50));
      own.drain();
    });
  };
  const collectives::owner_update nothing = [](std::size_t, std::size_t, std::span<float>) {};
  CHECK(run(nothing, nothing) == std::vector<std::string>(2));
  const auto parted = run(nothing, {});
  CHECK(contains(parted[0] + parted[1], "reduce_scatter by pairwise"));
  const auto thrown = run(nothing, [](std::size_t layer, std::size_t, std::span<float>) {
    throw std::domain_error("layer " + std::to_string(layer) + " has diverged");
  });
  CHECK(thrown[1] == "layer 1 has diverged");
  CHECK_FALSE(thrown[0].empty());
}

TEST_CASE("owners: what an update throws is thrown again by every later call, whoever moves messages on") {
  for (const auto by : {collectives::progress_by::thread, collectives::progress_by::caller}) {
    memory_network network(1);
    engine own(network.of(0), plan_for(model_of({50}), 1, {}),
               {.progress = by, .timeout = 5s, .update = [](std::size_t, std::size_t, std::span<float>) {
                  throw std::domain_error("diverged");
                }});
    own.begin_step();
    own.ready(0, std::vector<float>(50, 1.0F));
    CHECK(message_of<std::domain_error>([&] { own.drain(); }) == "diverged");
    CHECK(message_of<std::domain_error>([&] { own.begin_step(); }) == "diverged");
    CHECK(message_of<std::domain_error>([&] { (void)own.parameters(0); }) == "diverged");
  }
}

TEST_CASE("owners: an update that calls its engine is refused, and nobody hangs") {
  const lamina::layout model = model_of({50});
  const collectives::plan plan = plan_for(model, 1, {});
  const std::vector<float> gradient(50, 1.0F);
  for (int call = 0; call < 4; ++call) {
    for (const auto progress : {collectives::progress_by::caller, collectives::progress_by::thread}) {
      memory_network network(1);
      engine* self = nullptr;
      const collectives::owner_update update = [&](std::size_t, std::size_t, std::span<float>) {
        if (call == 0) self->poll();
        if (call == 1) self->drain();
        if (call == 2) self->wait(0);
        if (call == 3) self->ready(0, gradient);
      };
      engine own(network.of(0), plan, {.progress = progress, .timeout = 2s, .update = update});
      self = &own;
      own.begin_step();
      const std::string said = message_of<std::logic_error>([&] {
        own.ready(0, gradient);
        own.drain();
      });
      CHECK(contains(said, "options.update calls the engine that has called it"));
    }
  }
}
