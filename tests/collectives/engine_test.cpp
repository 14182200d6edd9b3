// SPDX-License-Identifier: MIT
// Engines of ranks in one process: what they sum, what they send, and what a rank learns of another that fails.
#include "lamina/collectives/engine.hpp"

#include <unistd.h>

#include <filesystem>
#include <latch>
#include <string>
#include <thread>

#include "catch.hpp"
#include "ranks.hpp"

namespace lamina_test::engine_test {

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

// Hands over `gradient` of all layers, whose elements are equal, and waits.
void one_step(engine& own, float gradient = 1) {
  own.begin_step();
  const lamina::layout& model = own.used_plan().model();
  for (std::size_t l = model.layers(); l-- > 0;) own.ready(l, std::vector<float>(model.sizes()[l], gradient));
  own.drain();
}

}  // namespace

// Each schedule has its own delays, order of layers and turns.
TEST_CASE(
    "engine: means are bitwise those expected whatever is delayed, bytes by the formula, and no deadlock") {
  std::mt19937 random(1921);
  const std::vector<variant> variants = all_variants();
  for (std::uint64_t seed = 0; seed < 2500; ++seed) {
    // In one of forty there are more of them than a rank has rounds under way at once.
    const std::size_t ranks = below(random, 40) == 0 ? 9 + below(random, 10) : 1 + below(random, 5);
    const variant tried = variants[below(random, variants.size())];
    if (!tried.exists(ranks)) continue;
    const std::size_t last = below(random, 10) == 0 ? 3000 : 200;
    const lamina::layout model = model_of({below(random, 70), 1 + below(random, 90), below(random, last)});
    const collectives::plan plan = tried.plan(model, ranks, below(random, 2) * 400);
    memory_network network(ranks, {.seed = seed, .most_delay = static_cast<unsigned>(below(random, 6))});
    auto engines = engines_over(network, plan, [&](std::size_t) { return with_owners(tried, in_turn()); });
    std::vector<std::uint64_t> formula(ranks);
    for (std::size_t r = 0; r < ranks; ++r) formula[r] = opening_bytes(ranks, r);
    for (std::size_t step = 0; step <= seed % 8 / 7; ++step) {
      const all_gradients gradients = random_gradients(random, model, ranks);
      const std::vector<bool> is_sent = {below(random, 2) == 0, true, below(random, 4) != 0};
      run_step(engines, gradients, is_sent, random);
      const auto expected = expected_means(plan, tried, gradients, is_sent);
      for (std::size_t r = 0; r < ranks; ++r) {
        formula[r] += step_bytes(plan, tried, r, is_sent);
        if (!has_means(*engines[r], tried, expected) || network.sent_bytes(r) != formula[r] ||
            engines[r]->totals().sent_bytes != formula[r])
          FAIL("other bits or bytes, seed " << seed << ", " << ranks << " ranks, " << tried.name());
      }
    }
    REQUIRE(network.under_way() == 0);
  }
}

TEST_CASE("engine: numbers that are none, or beyond the range of the payload") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const lamina::layout model = model_of({4});
  const auto means_of = [&](payload_type type, const std::vector<float>& first,
                            const std::vector<float>& second) {
    memory_network network(2);
    auto engines =
        engines_over(network, plan_for(model, 2, {.payload = type}), [](std::size_t) { return in_turn(); });
    std::mt19937 random(3004);
    run_step(engines, {{first}, {second}}, {true}, random);
    const auto mean = engines[1]->mean(0);
    return std::vector<float>(mean.begin(), mean.end());
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

// By the order of what happens: backward of layer 0 does not go on before the sum of the last layer is there.
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
    own.wait(2);  // forward
    own.wait(1);
    if (own.is_done(0)) throw std::runtime_error("done before forward has passed layer 1");
    if (++forwards == 2) is_closed = false;
    own.wait(0);
  });
  CHECK(errors == std::vector<std::string>(ranks));

  // Without its thread nothing is summed between two calls.
  memory_network in_turns(ranks);
  auto engines = engines_over(in_turns, plan, [](std::size_t) { return in_turn(); });
  for (auto& each : engines) each->begin_step();
  for (auto& each : engines) each->ready(2, gradient);
  for (int k = 0; k < 1000; ++k) CHECK_FALSE(engines[0]->is_done(2));
}

// Of equal sizes, so that lengths do not tell: in one bucket, in two, and of several chunks.
TEST_CASE("engine: another decision on a rank is noticed, and nobody hangs") {
  for (const std::size_t elements : {64U, 3000U}) {
    for (const std::size_t bucket_bytes : {0U, 1'000'000U}) {
      memory_network network(2);
      const collectives::plan plan =
          plan_for(model_of({elements, elements}), 2, {.bucket_bytes = bucket_bytes, .chunk_bytes = 4096});
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
  const collectives::plan plan =
      plan_for(model_of({100}), 2, {.choice = algorithm_choice::always(algorithm::ring)});
  const auto fingerprint = static_cast<std::uint32_t>(plan.fingerprint());
  struct damage {
    std::size_t at;
    std::string sentence;
  };
  // Each sentence names its field, and no other field has it.
  const std::vector<damage> all = {
      {0, "sends something that is no round of a collective"},
      {4, "is in collective 5 of step 1 (ring, round 0), this one in 1"},
      {8, "is in collective 1 of step 5 (ring, round 0), this one in step 1"},
      {16, "was started with another plan (" + std::to_string(fingerprint ^ 4U) + ", this one has " +
               std::to_string(fingerprint) + ")"},
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
    auto engines = engines_over(network, plan, [](std::size_t) {
      return engine_options{.progress = progress_by::caller, .timeout = 5s};
    });
    for (auto& own : engines) own->begin_step();
    for (auto& own : engines) own->ready(0, std::vector<float>(100, 1.0F));
    const std::string error = message_of<collectives::channel_error>([&] {
      for (int k = 0; k < 1000; ++k) {
        for (auto& own : engines) own->poll();
      }
    });
    CHECK(error == "rank 0 " + each.sentence + ", in collective 1 of step 1 (ring, round 0)");
    // Rank 1 goes on throwing it.
    CHECK(message_of<collectives::channel_error>([&] { engines[1]->drain(); }) == error);
    CHECK(message_of<collectives::channel_error>([&] { engines[1]->begin_step(); }) == error);
  }
}

// In the first segment and in the last: what has come with a header that is refused, or behind it, is not added.
TEST_CASE("executor: nothing is added of a round whose header is refused") {
  for (const algorithm how : collectives::all_algorithms) {
    for (std::size_t at = 0; at < collectives::round_header::size_bytes; ++at) {
      memory_network network(2, {.interfere = [&](const seen_message& seen) {
                               if (seen.from == 0 && !seen.bytes.header.empty())
                                 seen.bytes.header[at] ^= std::byte{4};
                               return fate::arrives;
                             }});
      std::array<collectives::executor::memory, 2> memories;
      rank_vectors elements = {std::vector<float>(100, 1.0F), std::vector<float>(100, 2.0F)};
      collectives::executor sender(network.of(0), 7, 100, memories[0], in_turn().piece_bytes);
      collectives::executor receiver(network.of(1), 7, 100, memories[1], in_turn().piece_bytes);
      sender.start({.header = {.number = 3, .step = 2, .how = how}, .elements = elements[0]});
      receiver.start({.header = {.number = 3, .step = 2, .how = how}, .elements = elements[1]});
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
  memory_network network(2);
  collectives::executor::memory memory;
  collectives::executor executor(network.of(0), 7, 100, memory);
  std::vector<float> elements(100);
  CHECK(message_of<std::logic_error>([&] {
          executor.start(
              {.header = {.how = algorithm::ring}, .payload = payload_type::bfloat16, .elements = elements});
        }) == "ring has no payload bfloat16");
}

// Headers are the same then: only the lengths tell.
TEST_CASE("engine: other segments on a rank are refused by their lengths") {
  const collectives::plan plan =
      plan_for(model_of({300}), 2, {.choice = algorithm_choice::always(algorithm::ring)});
  for (const std::size_t larger : {0U, 1U}) {
    memory_network network(2);
    auto engines = engines_over(network, plan, [&](std::size_t r) {
      auto options = in_turn();
      options.piece_bytes = r == larger ? 232 : 132;
      return options;
    });
    for (auto& own : engines) own->begin_step();
    for (auto& own : engines) own->ready(0, std::vector<float>(300, 1.0F));
    const auto error_of = [&](std::size_t r) {
      return message_of<collectives::channel_error>([&] {
        for (int k = 0; k < 100; ++k) {
          engines[r]->poll();
          std::ignore = throws<collectives::channel_error>([&] { engines[1 - r]->poll(); });
        }
      });
    };
    CHECK(contains(error_of(larger),
                   "sends 132 bytes where 232 are expected, in collective 1 of step 1 (ring, round 0)"));
    CHECK(contains(error_of(1 - larger), "sends more than the 132 bytes that are expected, in collective 1"));
  }
}

TEST_CASE("engine: a silent rank is named after the timeout, and one that leaves at once") {
  const lamina::layout model = model_of({100, 50});
  {
    const collectives::plan plan = plan_for(model, 2, {});
    std::size_t of_rank_1 = 0;
    memory_network network(2, {.interfere = [&](const seen_message& seen) {
                             return seen.from == 1 && of_rank_1++ > 0 ? fate::is_lost : fate::arrives;
                           }});
    std::string silence;
    std::latch noticed(1);
    in_threads(2, [&](std::size_t r) {
      engine own(network.of(r), plan, {.timeout = r == 0 ? 200ms : 20s});
      if (r == 0) silence = message_of<std::runtime_error>([&] { one_step(own); });
      if (r == 0) return noticed.count_down();
      own.begin_step();
      for (const std::size_t l : {1U, 0U}) own.ready(l, std::vector<float>(model.sizes()[l]));
      noticed.wait();  // it is silent, and has not left
    });
    CHECK(contains(
        silence,
        "nothing heard for 0.200 s while exchanging with rank 1 in collective 1 of step 1 (pairwise, round"));
  }
  for (const int steps : {0, 1}) {
    memory_network network(3);
    const auto errors = in_threads(3, [&](std::size_t r) {
      engine own(network.of(r), plan_for(model, 3, {}), {.timeout = 20s});
      for (int step = 0; step < steps; ++step) one_step(own);
      if (r == 2) own.begin_step();
      if (r == 2) throw std::runtime_error("an error of the caller's");
      one_step(own);
    });
    CHECK(errors[2] == "an error of the caller's");
    // One of them waits for rank 2; the other, maybe, for that one.
    for (const std::size_t r : {0U, 1U}) CHECK(contains(errors[r], "has left"));
    CHECK((contains(errors[0], "rank 2 has left") || contains(errors[1], "rank 2 has left")));
  }
}

TEST_CASE("engine: leaves no thread behind, and where it has begun no step its channel to the next") {
  // The thread sanitizer begins one of its own with the first, and the system lists a thread a little longer than until it is joined.
  pid_t first = 0;
  std::thread([&] { first = gettid(); }).join();
  while (std::filesystem::exists("/proc/self/task/" + std::to_string(first))) std::this_thread::yield();
  const std::size_t before = threads_of_this_process();
  const collectives::plan plan = plan_for(model_of({100}), 2, {});
  {
    memory_network network(2);
    engine abandoned(network.of(0), plan);  // its peer never comes
    abandoned.begin_step();
    abandoned.ready(0, std::vector<float>(100));
  }
  memory_network other_ranks(3);
  CHECK_THROWS_AS(engine(other_ranks.of(0), plan), std::invalid_argument);
  memory_network network(2);
  CHECK_THROWS_AS(engine(network.of(0), plan, {.piece_bytes = 35}), std::invalid_argument);
  for (const auto by : {progress_by::thread, progress_by::caller}) {
    {
      engine unused(network.of(0), plan, {.progress = by});
      if (by == progress_by::caller) CHECK_FALSE(unused.poll());
      if (by == progress_by::thread) std::this_thread::sleep_for(20ms);
    }
    CHECK(network.under_way() == 0);
    memory_network used(2);
    const auto errors = in_threads(2, [&](std::size_t r) {
      { engine unused(used.of(r), plan, {.progress = by}); }
      engine own(used.of(r), plan, {.progress = by, .timeout = 5s});
      one_step(own);
    });
    CHECK(errors == std::vector<std::string>(2));
  }
  for (int tries = 0; tries < 500 && threads_of_this_process() != before; ++tries)
    std::this_thread::sleep_for(10ms);
  CHECK(threads_of_this_process() == before);
}

TEST_CASE("engine: calls out of order are refused by name") {
  memory_network network(1);
  const collectives::plan plan = plan_for(model_of({10, 20}), 1, {.bucket_bytes = 0});
  engine own(network.of(0), plan, {.progress = progress_by::caller});
  const std::vector<float> gradient(20, 1.0F);
  const auto refuses = [&](const char* named, auto call) {
    CHECK(contains(message_of<std::logic_error>(call), named));
  };
  own.wait(0);  // nothing is under way: a gate passes
  CHECK(own.is_done(0));
  refuses("before the first step", [&] { own.ready(1, gradient); });
  refuses("is not summed yet", [&] { (void)own.mean(0); });
  own.begin_step();
  refuses("out of range", [&] { own.ready(2, gradient); });
  refuses("has shape [10] (10 elements)", [&] { own.ready(0, gradient); });
  refuses("layer 1 'layer1' was not ready when it was waited for in step 1", [&] { own.wait(0); });
  own.ready(1, gradient);
  refuses("layer 1 'layer1' is handed over twice in step 1", [&] { own.ready(1, gradient); });
  refuses("is handed over twice", [&] { own.hold_back(1); });
  refuses("layer 0 'layer0' was not ready in step 1", [&] { own.begin_step(); });
  own.hold_back(0);
  own.drain();
  CHECK(own.mean(0).empty());
  CHECK(own.mean(1).size() == 20);
  own.begin_step();
  CHECK(own.step() == 2);
  refuses("is not summed yet in step 2", [&] { (void)own.mean(1); });
}

TEST_CASE("agreement: the order, and whoever has seen another one") {
  const lamina::layout model = model_of({1, 2, 3});
  memory_network network(3);
  const std::vector<std::size_t> order = {2, 0, 1};
  const std::vector<std::size_t> other = {2, 1, 0};
  for (const bool is_agreed : {true, false}) {
    const auto errors = in_threads(3, [&](std::size_t r) {
      const auto& own = r == 2 && !is_agreed ? other : order;
      if (collectives::agree_on_order(network.of(r), model, own) != order)
        throw std::runtime_error("another order");
    });
    const std::string expected =
        is_agreed ? "" : "rank 2 has its gradient of 'layer1' where rank 0 has that of 'layer0'";
    CHECK(errors == std::vector<std::string>(3, expected));
  }
}

// What it had posted would be written to after its return.
TEST_CASE("agreement: a rank that gives up leaves no message behind, and its channel has ended") {
  const std::vector<std::size_t> order = {1, 0};
  const auto talk = [&](collectives::channel& over, std::size_t last = 2) {
    std::ignore = collectives::agree_on_order(over, model_of({1, last}), order, 20ms);
  };
  {
    memory_network network(2);
    CHECK(message_of<channel_error>([&] { talk(network.of(1)); }) ==
          "nothing heard for 0.020 s while exchanging with rank 0 in collective 0 of step 0 (pairwise, round "
          "0)");
    CHECK(network.under_way() == 0);
    CHECK(contains(message_of<std::logic_error>([&] { talk(network.of(1)); }), "make a new channel"));
    CHECK(contains(message_of<channel_error>([&] { talk(network.of(0)); }), "rank 1 has left"));
    CHECK(network.under_way() == 0);
  }
  memory_network network(2);
  const std::vector<std::byte> bytes(8);
  network.of(1).send(0, {{}, bytes});
  CHECK(contains(message_of<channel_error>([&] { talk(network.of(0)); }),
                 "rank 1 sends 8 bytes where 40 are expected"));
  CHECK(contains(message_of<std::logic_error>([&] { talk(network.of(0)); }), "make a new channel"));
  memory_network other(2);
  const auto errors = in_threads(2, [&](std::size_t r) { talk(other.of(r), 2 + r); });
  CHECK((contains(errors[0], "another plan") || contains(errors[1], "another plan")));
}

// It polls, computes for longer than the timeout, and polls: the others had no time to be heard in.
TEST_CASE("engine: time in which a rank did not look is not the silence of others") {
  const collectives::plan plan = plan_for(model_of({50}), 2, {});
  bool is_closed = true;
  memory_network network(
      2, {.interfere = [&](const seen_message&) { return is_closed ? fate::is_held_back : fate::arrives; }});
  const engine_options options = {.progress = progress_by::caller, .timeout = 60ms};
  engine first(network.of(0), plan, options);
  engine second(network.of(1), plan, options);
  const std::vector<float> gradient(50, 1.0F);
  for (engine* each : {&first, &second}) {
    each->begin_step();
    each->ready(0, gradient);
  }
  for (int k = 0; k < 2; ++k) {
    std::this_thread::sleep_for(100ms);
    CHECK_FALSE(first.poll());
  }
  is_closed = false;
  for (int k = 0; k < 1000; ++k) {
    first.poll();
    second.poll();
  }
  CHECK(first.is_done(0));
  // While it looks, its patience ends.
  is_closed = true;
  CHECK(contains(message_of<channel_error>([&] { one_step(first); }), "nothing heard for 0.060 s"));
}

TEST_CASE("timeout: the longest is no time in the past, and none is refused") {
  const lamina::layout model = model_of({50, 50});
  const collectives::plan plan = plan_for(model, 2, {});
  const std::vector<std::size_t> order = {1, 0};
  memory_network network(2);
  const auto errors = in_threads(2, [&](std::size_t r) {
    constexpr auto longest = std::chrono::milliseconds::max();
    if (r == 0) std::this_thread::sleep_for(5ms);
    std::ignore = collectives::agree_on_order(network.of(r), model, order, longest);
    engine own(network.of(r), plan, {.timeout = longest});
    if (r == 0) std::this_thread::sleep_for(5ms);
    one_step(own);
  });
  CHECK(errors == std::vector<std::string>(2));
  for (const auto timeout : {0ms, std::chrono::milliseconds(std::chrono::milliseconds::min())}) {
    CHECK(contains(
        message_of<std::invalid_argument>([&] { engine(network.of(0), plan, {.timeout = timeout}); }),
        "a timeout of " + std::to_string(timeout.count()) + " ms: it must be above 0"));
    CHECK(contains(message_of<std::invalid_argument>([&] {
                     std::ignore = collectives::agree_on_order(network.of(0), model, order, timeout);
                   }),
                   "it must be above 0"));
  }
}

}  // namespace lamina_test::engine_test
