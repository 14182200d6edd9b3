// SPDX-License-Identifier: MIT
#include "lamina/collectives/engine.hpp"

#include <chrono>
#include <filesystem>
#include <latch>
#include <optional>
#include <random>
#include <stdexcept>

#include "catch.hpp"
#include "memory_ranks.hpp"

using namespace lamina_test;
using collectives::algorithm;
using collectives::algorithm_choice;
using collectives::engine;
using collectives::engine_options;
using collectives::progress_by;

namespace {

using namespace std::chrono_literals;

std::size_t threads_of_this_process() {
  const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

}  // namespace

// The eighth oracle: 10,000 schedules, each with its own delays, order of layers and turns.
TEST_CASE("engine: the same bits whatever is delayed, and no deadlock") {
  std::mt19937 random(1921);
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    // In one of forty there are more of them than a rank has rounds under way at once.
    const std::size_t ranks = below(random, 40) == 0 ? 9 + below(random, 10) : 1 + below(random, 5);
    const lamina::layout model = model_of({below(random, 70), 1 + below(random, 90), below(random, 200)});
    const auto how = collectives::all_algorithms[below(random, collectives::all_algorithms.size())];
    const collectives::plan plan = plan_for(model, ranks,
                                            {.bucket_bytes = below(random, 2) * 400,
                                             .chunk_bytes = 4096,
                                             .choice = algorithm_choice::always(how)});
    memory_network network(ranks, {.seed = seed, .most_delay = static_cast<unsigned>(below(random, 6))});
    auto engines = engines_over(network, plan, in_turn());
    const all_gradients gradients = random_gradients(random, model, ranks);
    const std::vector<bool> is_sent = {below(random, 2) == 0, true, below(random, 4) != 0};
    run_step(engines, gradients, is_sent, random);
    const auto expected = expected_means(plan, gradients, is_sent);
    for (auto& each : engines) {
      if (!has_means(*each, expected)) FAIL("other bits, seed " << seed << ", " << collectives::name_of(how));
    }
    REQUIRE(network.under_way() == 0);
  }
}

TEST_CASE("engine: several steps, chunks, layers held back, and bytes by the formula") {
  std::mt19937 random(1922);
  for (const algorithm how : collectives::all_algorithms) {
    for (const std::size_t ranks : {1U, 2U, 3U, 4U, 7U}) {
      INFO(collectives::name_of(how) << ", " << ranks << " ranks");
      const lamina::layout model = model_of({5000, 1, 0, 700, 2500});
      const collectives::plan plan = plan_for(
          model, ranks, {.bucket_bytes = 6000, .chunk_bytes = 4096, .choice = algorithm_choice::always(how)});
      memory_network network(ranks, {.seed = 3, .most_delay = 2});
      auto engines = engines_over(network, plan, in_turn());
      std::vector<std::uint64_t> formula(ranks);
      const auto count = [&](algorithm by, std::size_t elements) {
        for (std::size_t r = 0; r < ranks; ++r) {
          const auto rounds = rounds_of(collectives::operation::all_reduce, by, ranks, r, elements);
          formula[r] += 4 * formula_of_sent(by, ranks, r, elements) + 32 * sent(rounds).messages;
        }
      };
      count(algorithm::pairwise, 1);  // in which plans are compared
      for (int step = 0; step < 4; ++step) {
        const all_gradients gradients = random_gradients(random, model, ranks);
        std::vector<bool> is_sent(5, true);
        if (step > 0) is_sent[below(random, 5)] = is_sent[below(random, 5)] = false;
        run_step(engines, gradients, is_sent, random);
        const auto expected = expected_means(plan, gradients, is_sent);
        for (auto& each : engines) REQUIRE(has_means(*each, expected));
        for (const auto& bucket : plan.buckets()) {
          std::size_t elements = 0;
          for (const std::size_t l : bucket.layers) elements += is_sent[l] ? model.sizes()[l] : 0;
          for (std::size_t begin = 0; begin < elements; begin += plan.chunk_elements())
            count(how, std::min(plan.chunk_elements(), elements - begin));
        }
      }
      for (std::size_t r = 0; r < ranks; ++r) {
        CHECK(network.sent_bytes(r) == formula[r]);
        CHECK(engines[r]->totals().sent_bytes == formula[r]);
      }
    }
  }
}

TEST_CASE("engine: threads give the same bits as turns") {
  std::mt19937 random(1923);
  const std::size_t ranks = 4;
  const lamina::layout model = model_of({3000, 10, 800, 64});
  const collectives::plan plan = plan_for(
      model, ranks,
      {.bucket_bytes = 2000, .chunk_bytes = 4096, .choice = algorithm_choice::always(algorithm::ring)});
  memory_network network(ranks);
  std::vector<all_gradients> gradients;
  for (int step = 0; step < 20; ++step) gradients.push_back(random_gradients(random, model, ranks));
  const auto errors = in_threads(ranks, [&](std::size_t r) {
    engine own(network.of(r), plan, {.timeout = 20s});
    for (const all_gradients& of_step : gradients) {
      own.begin_step();
      for (std::size_t l = model.layers(); l-- > 0;) own.ready(l, of_step[r][l]);
      own.drain();
      if (!has_means(own, expected_means(plan, of_step, std::vector<bool>(4, true))))
        throw std::runtime_error("other bits");
    }
    if (own.totals().collectives == 0) throw std::runtime_error("nothing was counted");
  });
  CHECK(errors == std::vector<std::string>(ranks));
}

// The seventh oracle, by the order of what happens: the "backward" of layer 0 does not go on before the sum of the last layer is there.
TEST_CASE("engine: a sum completes while backward goes on, and forward begins while the last is open") {
  const std::size_t ranks = 2;
  const lamina::layout model = model_of({100, 100, 100});
  const collectives::plan plan = plan_for(model, ranks, {.bucket_bytes = 0});
  std::atomic<bool> is_closed = false;
  memory_network network(ranks, {.interfere = [&](const seen_message&) {
                           return is_closed ? fate::is_held_back : fate::arrives;
                         }});
  std::atomic<int> forwards = 0;
  const std::vector<float> gradient(100, 1.0F);
  const auto errors = in_threads(ranks, [&](std::size_t r) {
    engine own(network.of(r), plan, {.timeout = 20s});
    own.begin_step();
    own.ready(2, gradient);
    own.ready(1, gradient);
    own.wait(2);
    own.wait(1);
    is_closed = true;  // the sum of layer 0 cannot end before forward has passed layer 1
    own.ready(0, gradient);
    if (own.is_done(0)) throw std::runtime_error("done before its time");
    own.wait(2);  // forward
    own.wait(1);
    if (own.is_done(0)) throw std::runtime_error("done before forward has passed layer 1");
    if (++forwards == 2) is_closed = false;
    own.wait(0);
  });
  CHECK(errors == std::vector<std::string>(ranks));
}

// Its control: with nobody to move messages on, the sum is not there.
TEST_CASE("engine: without its thread nothing is summed between two calls") {
  memory_network network(2);
  const lamina::layout model = model_of({100, 100});
  const collectives::plan plan = plan_for(model, 2, {.bucket_bytes = 0});
  auto engines = engines_over(network, plan, {.progress = progress_by::caller, .timeout = 5s});
  const std::vector<float> gradient(100, 1.0F);
  for (auto& each : engines) each->begin_step();
  for (auto& each : engines) each->ready(1, gradient);
  for (int k = 0; k < 1000; ++k) CHECK_FALSE(engines[0]->is_done(1));
}

TEST_CASE("engine: whoever has another plan is named, and nobody hangs") {
  const lamina::layout model = model_of({100, 50});
  const auto plan_with = [&](const std::vector<std::size_t>& order,
                             const collectives::plan_options& options = {}) {
    return collectives::plan(model, 3, order, std::vector<collectives::layer_class>(2), options);
  };
  // Other buckets, chunks, algorithms; a ready order of its own.
  const std::vector<collectives::plan> others = {
      plan_with({1, 0}, {.bucket_bytes = 0}), plan_with({1, 0}, {.chunk_bytes = 8192}),
      plan_with({1, 0}, {.choice = algorithm_choice::always(algorithm::ring)}),
      plan_with({1, 0}, {.choice = algorithm_choice::always(algorithm::halving_doubling)}),
      plan_with({0, 1})};
  for (const auto& other : others) {
    memory_network network(3);
    const std::vector<float> gradient(100, 1.0F);
    const auto errors = in_threads(3, [&](std::size_t r) {
      engine own(network.of(r), r == 1 ? other : plan_with({1, 0}), {.timeout = 10s});
      own.begin_step();
      own.ready(1, std::span(gradient).first(50));
      own.ready(0, gradient);
      own.drain();
    });
    for (const std::string& each : errors) {
      CHECK((contains(each, "another plan") || contains(each, "has left")));
    }
    CHECK(std::ranges::any_of(
        errors, [](const auto& each) { return contains(each, "rank 1 was started with another plan"); }));
  }
}

// Of equal sizes, so that lengths do not tell: in one bucket, in two, and of several chunks.
TEST_CASE("engine: another decision on a rank is noticed, and nobody hangs") {
  for (const std::size_t elements : {64U, 3000U}) {
    for (const std::size_t bucket_bytes : {0U, 1'000'000U}) {
      const lamina::layout model = model_of({elements, elements});
      memory_network network(2);
      const collectives::plan plan = plan_for(model, 2, {.bucket_bytes = bucket_bytes, .chunk_bytes = 4096});
      const std::vector<float> gradient(elements, 1.0F);
      const auto errors = in_threads(2, [&](std::size_t r) {
        engine own(network.of(r), plan, {.timeout = 10s});
        own.begin_step();
        r == 0 ? own.ready(1, gradient) : own.hold_back(1);
        r == 0 ? own.hold_back(0) : own.ready(0, gradient);
        own.drain();
      });
      const std::string expected =
          bucket_bytes == 0 ? "is in collective" : "has chosen other layers than this one";
      CHECK((contains(errors[0], expected) || contains(errors[1], expected)));
      for (const std::string& each : errors) CHECK((contains(each, expected) || contains(each, "has left")));
    }
  }
}

TEST_CASE("engine: a damaged header is refused by its field, and by all calls from then on") {
  const lamina::layout model = model_of({100});
  const collectives::plan plan = plan_for(model, 2, {.choice = algorithm_choice::always(algorithm::ring)});
  struct damage {
    std::size_t at;
    std::string sentence;
  };
  // Each sentence names its field, and no other field has it.
  const std::vector<damage> all = {
      {0, "sends something that is no round of a collective"},
      {4, "is in collective 5 of step 1 (ring, round 0), this one in 1"},
      {8, "is in collective 1 of step 5 (ring, round 0), this one in step 1"},
      {16, "was started with another plan (" +
               std::to_string(static_cast<std::uint32_t>(plan.fingerprint()) ^ 4U) + ", this one has " +
               std::to_string(static_cast<std::uint32_t>(plan.fingerprint())) + ")"},
      {20, "runs collective 1 as unknown by ring, this one as all_reduce by ring"},
      {21, "runs collective 1 as all_reduce by unknown, this one as all_reduce by ring"},
      {22, "is in collective 1 of step 1 (ring, round 4), this one in round 0"},
      {24, "sends 54 elements in collective 1 of step 1 (ring, round 0), where 50 are expected"},
      {28, "has chosen other layers than this one for collective 1 of step 1"}};
  for (const damage& each : all) {
    // The opening sum has messages 0 and 1; rank 0's first of the step is damaged.
    memory_network network(2, {.interfere = [&](const seen_message& seen) {
                             if (seen.index >= 2 && seen.from == 0 && !seen.bytes.header.empty())
                               seen.bytes.header[each.at] ^= std::byte{4};
                             return fate::arrives;
                           }});
    auto engines = engines_over(network, plan, {.progress = progress_by::caller, .timeout = 5s});
    for (auto& own : engines) own->begin_step();
    const std::vector<float> gradient(100, 1.0F);
    for (auto& own : engines) own->ready(0, gradient);
    const auto run = [&] {
      for (int k = 0; k < 1000; ++k) {
        for (auto& own : engines) own->poll();
      }
    };
    const std::string error = message_of<collectives::channel_error>(run);
    CHECK(error == "rank 0 " + each.sentence + ", in collective 1 of step 1 (ring, round 0)");
    // Rank 1 goes on throwing it.
    CHECK(message_of<collectives::channel_error>([&] { engines[1]->drain(); }) == error);
    CHECK(message_of<collectives::channel_error>([&] { engines[1]->begin_step(); }) == error);
  }
}

// In the first piece and in the last: what has come with a header that is refused, or behind it, is not added.
TEST_CASE("executor: nothing is added of a round whose header is refused") {
  for (const algorithm how : {algorithm::ring, algorithm::halving_doubling, algorithm::pairwise}) {
    for (std::size_t at = 0; at < collectives::round_header::size_bytes; ++at) {
      memory_network network(2, {.interfere = [&](const seen_message& seen) {
                               if (seen.from == 0 && !seen.bytes.header.empty())
                                 seen.bytes.header[at] ^= std::byte{4};
                               return fate::arrives;
                             }});
      std::array<collectives::executor::memory, 2> memories;
      std::array<std::vector<float>, 2> elements = {std::vector<float>(100, 1.0F),
                                                    std::vector<float>(100, 2.0F)};
      collectives::executor sender(network.of(0), 7, 100, memories[0], in_turn().pieces);
      collectives::executor receiver(network.of(1), 7, 100, memories[1], in_turn().pieces);
      const collectives::collective same = {.number = 3, .step = 2, .how = how, .elements = {}};
      const auto with = [&](std::size_t r) {
        auto made = same;
        made.elements = elements[r];
        return made;
      };
      sender.start(with(0));
      receiver.start(with(1));
      CHECK_THROWS_AS(
          [&] {
            for (int k = 0; k < 100; ++k) {
              receiver.advance();
              sender.advance();
            }
          }(),
          collectives::channel_error);
      CHECK(elements[1] == std::vector<float>(100, 2.0F));
    }
  }
}

// Headers are the same then: the lengths alone tell.
TEST_CASE("engine: other pieces on a rank are refused by their lengths") {
  const lamina::layout model = model_of({300});
  const collectives::plan plan = plan_for(model, 2, {.choice = algorithm_choice::always(algorithm::ring)});
  for (const std::size_t larger : {0U, 1U}) {
    memory_network network(2);
    std::vector<std::unique_ptr<engine>> engines;
    for (std::size_t r = 0; r < 2; ++r) {
      auto options = in_turn();
      options.pieces.both_ways = r == larger ? 232 : 132;
      engines.push_back(std::make_unique<engine>(network.of(r), plan, options));
    }
    const std::vector<float> gradient(300, 1.0F);
    for (auto& own : engines) own->begin_step();
    for (auto& own : engines) own->ready(0, gradient);
    const auto error_of = [&](std::size_t r) {
      return message_of<collectives::channel_error>([&] {
        for (int k = 0; k < 100; ++k) {
          engines[r]->poll();
          try {
            engines[1 - r]->poll();
          } catch (const collectives::channel_error&) {
            // Its turn is below.
          }
        }
      });
    };
    CHECK(contains(error_of(larger),
                   "sends 132 bytes where 232 are expected, in collective 1 of step 1 (ring, round 0)"));
    CHECK(contains(error_of(1 - larger), "sends more than the 132 bytes that are expected, in collective 1"));
  }
}

TEST_CASE("engine: a silent rank is named after the timeout, and one that leaves at once") {
  const lamina::layout model = model_of({100});
  const std::vector<float> gradient(100, 1.0F);
  {
    const collectives::plan plan = plan_for(model, 2, {});
    std::size_t of_rank_1 = 0;
    memory_network network(2, {.interfere = [&](const seen_message& seen) {
                             return seen.from == 1 && of_rank_1++ > 0 ? fate::is_lost : fate::arrives;
                           }});
    std::string silence;
    std::latch noticed(1);
    const auto errors = in_threads(2, [&](std::size_t r) {
      engine own(network.of(r), plan, {.timeout = r == 0 ? 200ms : 20s});
      own.begin_step();
      own.ready(0, gradient);
      if (r == 0) silence = message_of<std::runtime_error>([&] { own.drain(); });
      if (r == 0) noticed.count_down();
      if (r == 1) noticed.wait();  // it is silent, and has not left
    });
    CHECK(contains(
        silence,
        "nothing heard for 0.200 s while exchanging with rank 1 in collective 1 of step 1 (pairwise, round"));
  }
  const collectives::plan plan = plan_for(model, 3, {});
  memory_network network(3);
  const auto errors = in_threads(3, [&](std::size_t r) {
    engine own(network.of(r), plan, {.timeout = 20s});
    own.begin_step();
    if (r == 2) throw std::runtime_error("an error of the caller's");
    own.ready(0, gradient);
    own.drain();
  });
  CHECK(errors[2] == "an error of the caller's");
  CHECK(contains(errors[0], "has left"));
  CHECK(contains(errors[1], "has left"));
}

TEST_CASE("engine: leaves no thread behind, whatever fails") {
  const std::size_t before = threads_of_this_process();
  const lamina::layout model = model_of({100});
  {
    memory_network network(2);
    const collectives::plan plan = plan_for(model, 2, {});
    engine alone(network.of(0), plan);  // its peer never comes
    alone.begin_step();
    alone.ready(0, std::vector<float>(100));
  }
  {
    memory_network network(3);
    CHECK_THROWS_AS(engine(network.of(0), plan_for(model, 2, {})), std::invalid_argument);
    CHECK_THROWS_AS(engine(network.of(0), plan_for(model, 3, {}), {.pieces = {.both_ways = 35}}),
                    std::invalid_argument);
  }
  CHECK(threads_of_this_process() == before);
}

TEST_CASE("engine: calls out of order are refused by name") {
  memory_network network(1);
  const lamina::layout model = model_of({10, 20});
  const collectives::plan plan = plan_for(model, 1, {.bucket_bytes = 0});
  engine own(network.of(0), plan, {.progress = progress_by::caller});
  const std::vector<float> gradient(20, 1.0F);
  const auto refusal = [&](auto call) { return message_of<std::logic_error>(call); };
  own.wait(0);  // nothing is under way: a gate passes
  CHECK(own.is_done(0));
  CHECK(contains(refusal([&] { own.ready(1, gradient); }), "before the first step"));
  CHECK(contains(refusal([&] { (void)own.mean(0); }), "is not summed yet"));
  own.begin_step();
  CHECK(contains(refusal([&] { own.ready(2, gradient); }), "out of range"));
  CHECK(contains(refusal([&] { own.ready(0, gradient); }), "has shape [10] (10 elements)"));
  CHECK(contains(refusal([&] { own.wait(0); }),
                 "layer 1 'layer1' was not ready when it was waited for in step 1"));
  own.ready(1, gradient);
  CHECK(
      contains(refusal([&] { own.ready(1, gradient); }), "layer 1 'layer1' is handed over twice in step 1"));
  CHECK(contains(refusal([&] { own.hold_back(1); }), "is handed over twice"));
  CHECK(contains(refusal([&] { own.begin_step(); }), "layer 0 'layer0' was not ready in step 1"));
  own.hold_back(0);
  own.drain();
  CHECK(own.mean(0).empty());
  CHECK(own.mean(1).size() == 20);
  own.begin_step();
  CHECK(own.step() == 2);
  CHECK(contains(refusal([&] { (void)own.mean(1); }), "is not summed yet in step 2"));
}

TEST_CASE("agreement: the order, and whoever has seen another one") {
  const lamina::layout model = model_of({1, 2, 3});
  memory_network network(3);
  const std::vector<std::size_t> order = {2, 0, 1};
  auto errors = in_threads(3, [&](std::size_t r) {
    if (collectives::agree_on_order(network.of(r), model, order) != order)
      throw std::runtime_error("another order");
  });
  CHECK(errors == std::vector<std::string>(3));
  errors = in_threads(3, [&](std::size_t r) {
    std::ignore =
        collectives::agree_on_order(network.of(r), model, r == 2 ? std::vector<std::size_t>{2, 1, 0} : order);
  });
  for (const std::string& each : errors)
    CHECK(each == "rank 2 has its gradient of 'layer1' where rank 0 has that of 'layer0'");
}
