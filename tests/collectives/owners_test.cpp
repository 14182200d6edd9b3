// SPDX-License-Identifier: MIT
// Shard owners: each rank updates its own shards, and hands the new parameters round.
#include "catch.hpp"
#include "lamina/collectives/engine.hpp"
#include "ranks.hpp"

namespace lamina_test::owners_test {

using collectives::algorithm_choice;
using collectives::engine;
using collectives::engine_options;
using namespace std::chrono_literals;

namespace {

// x <- x - rate·v with v <- 0.9·v + mean.
void momentum_step(float& parameter, float& velocity, float mean) {
  velocity = 0.9F * velocity + mean;
  parameter -= 0.1F * velocity;
}

// What a rank holds: all parameters, and the velocity of its own shards.
struct replica {
  rank_vectors parameters;
  rank_vectors velocity;
  std::vector<std::vector<int>> updated;  // how often this rank has updated each element

  explicit replica(const lamina::layout& model) {
    for (const std::size_t size : model.sizes()) {
      std::vector<float>& first = parameters.emplace_back(size);
      for (std::size_t i = 0; i < size; ++i)
        first[i] = static_cast<float>(i % 7) - 3 + static_cast<float>(parameters.size());
      velocity.emplace_back(size);
      updated.emplace_back(size);
    }
  }
  engine_options options() {
    engine_options made = in_turn();
    made.update = [this](std::size_t layer, std::size_t begin, std::span<float> mean) {
      for (std::size_t k = 0; k < mean.size(); ++k) {
        float next = parameters[layer][begin + k];
        momentum_step(next, velocity[layer][begin + k], mean[k]);
        mean[k] = next;
        ++updated[layer][begin + k];
      }
    };
    return made;
  }
  void take(engine& from) {
    for (std::size_t l = 0; l < parameters.size(); ++l) {
      const auto arrived = from.parameters(l);
      if (!arrived.empty()) std::ranges::copy(arrived, parameters[l].begin());
    }
  }
};

}  // namespace

// Whatever is delayed, dropped, and cut into chunks.
TEST_CASE("owners: all ranks have what one would have that updates everything, and a P-th of its velocity") {
  std::mt19937 random(77);
  std::size_t chunked = 0;
  for (std::uint64_t seed = 0; seed < 90; ++seed) {
    const std::size_t ranks = 1 + below(random, 8);
    const variant tried = {.how = collectives::all_algorithms[below(random, 3)], .has_owners = true};
    if (!tried.exists(ranks)) continue;
    INFO("seed " << seed << ", " << tried.name() << ", " << ranks << " ranks");
    const lamina::layout model =
        model_of({below(random, 6), 1 + below(random, 90), below(random, 2500), 300, below(random, 9)});
    const collectives::plan plan = tried.plan(model, ranks, below(random, 2) * 800);
    chunked += model.sizes()[2] > plan.chunk_elements() ? 1 : 0;
    memory_network network(ranks, {.seed = seed, .most_delay = static_cast<unsigned>(below(random, 6))});
    std::vector<replica> replicas(ranks, replica(model));
    auto engines = engines_over(network, plan, [&](std::size_t r) { return replicas[r].options(); });
    replica dense(model);
    std::vector<int> steps_of(model.layers());
    for (int step = 0; step < 3; ++step) {
      const all_gradients gradients = random_gradients(random, model, ranks);
      std::vector<bool> is_sent(model.layers());
      for (std::size_t l = 0; l < model.layers(); ++l) is_sent[l] = below(random, 3) != 0;
      run_step(engines, gradients, is_sent, random);
      for (std::size_t r = 0; r < ranks; ++r) replicas[r].take(*engines[r]);
      const rank_vectors means = expected_means(plan, tried, gradients, is_sent);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        steps_of[l] += is_sent[l] ? 1 : 0;
        for (std::size_t i = 0; i < means[l].size(); ++i)
          momentum_step(dense.parameters[l][i], dense.velocity[l][i], means[l][i]);
        for (const replica& each : replicas) REQUIRE(same_bits(each.parameters[l], dense.parameters[l]));
      }
    }
    // Each element has one owner, the same in every step whatever else was sent, and its velocity is only there.
    for (std::size_t l = 0; l < model.layers(); ++l) {
      for (std::size_t i = 0; i < model.sizes()[l]; ++i) {
        std::size_t owners = 0;
        for (const replica& each : replicas) {
          if (each.updated[l][i] == 0) continue;
          ++owners;
          REQUIRE(each.updated[l][i] == steps_of[l]);
          REQUIRE(each.velocity[l][i] == dense.velocity[l][i]);
        }
        REQUIRE(owners == (steps_of[l] > 0 ? 1U : 0U));
      }
      for (const replica& each : replicas) {
        const auto own = std::ranges::count_if(each.updated[l], [](int count) { return count > 0; });
        REQUIRE(static_cast<std::size_t>(own) <= (model.sizes()[l] + ranks - 1) / ranks);
      }
    }
  }
  CHECK(chunked > 10);
}

// The parameters that forward needs first are there while others are still on their way.
TEST_CASE("owners: the first layers come first, and forward begins while the last are open") {
  const std::size_t ranks = 3;
  const lamina::layout model = model_of({50, 60, 70});
  memory_network network(ranks);
  std::vector<replica> replicas(ranks, replica(model));
  auto engines = engines_over(network, plan_for(model, ranks, {.bucket_bytes = 0}),
                              [&](std::size_t r) { return replicas[r].options(); });
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
  memory_network three(3);
  CHECK(contains(message_of<std::invalid_argument>([&] {
                   engine(
                       three.of(0),
                       plan_for(model, 3, {.choice = algorithm_choice::always(algorithm::halving_doubling)}),
                       {.update = keep_mean});
                 }),
                 "halving_doubling over 3 ranks does not leave a shard to each of them"));

  const collectives::plan plan = plan_for(model, 1, {});
  memory_network one(1);
  engine sums(one.of(0), plan, in_turn());
  CHECK(contains(message_of<std::logic_error>([&] { (void)sums.parameters(0); }),
                 "has no owners: options.update is empty"));
  memory_network other(1);
  engine owner(other.of(0), plan, {.update = keep_mean});
  CHECK(contains(message_of<std::logic_error>([&] { (void)owner.mean(1); }),
                 "has its mean with its owners alone"));
}

TEST_CASE("owners: a rank without them is named") {
  const collectives::plan plan = plan_for(model_of({60}), 2, {});
  memory_network network(2);
  const auto parted = in_threads(2, [&](std::size_t r) {
    engine own(network.of(r), plan,
               {.timeout = 2s, .update = r == 0 ? keep_mean : collectives::owner_update()});
    own.begin_step();
    own.ready(0, std::vector<float>(60, 1.0F));
    own.drain();
  });
  CHECK(contains(parted[0] + parted[1], "reduce_scatter by pairwise"));
}

// Every later call throws it again, whoever moves messages on; and an update must not call its engine.
TEST_CASE("owners: what an update throws comes out of its engine, and nobody hangs") {
  const collectives::plan plan = plan_for(model_of({50}), 1, {});
  const std::vector<float> gradient(50, 1.0F);
  for (const auto progress : {collectives::progress_by::caller, collectives::progress_by::thread}) {
    for (int call = 0; call < 5; ++call) {
      memory_network network(1);
      engine* self = nullptr;
      const collectives::owner_update update = [&](std::size_t, std::size_t, std::span<float>) {
        if (call == 0) self->poll();
        if (call == 1) self->drain();
        if (call == 2) self->wait(0);
        if (call == 3) self->ready(0, gradient);
        throw std::logic_error("diverged");
      };
      engine own(network.of(0), plan, {.progress = progress, .timeout = 2s, .update = update});
      self = &own;
      own.begin_step();
      const std::string expected =
          call == 4 ? "diverged" : "options.update calls the engine that has called it";
      CHECK(contains(message_of<std::logic_error>([&] {
                       own.ready(0, gradient);
                       own.drain();
                     }),
                     expected));
      CHECK(contains(message_of<std::logic_error>([&] { own.begin_step(); }), expected));
      CHECK(contains(message_of<std::logic_error>([&] { (void)own.parameters(0); }), expected));
    }
  }
}

}  // namespace lamina_test::owners_test
