// SPDX-License-Identifier: MIT
// What ends a channel and what does not, and what a rank learns of another that fails.
#include <chrono>
#include <limits>
#include <stdexcept>

#include "catch.hpp"
#include "memory_ranks.hpp"

using namespace lamina_test;
using collectives::channel_error;
using collectives::engine;
using collectives::progress_by;

namespace {

using namespace std::chrono_literals;

const std::vector<std::size_t> both_layers = {1, 0};

void run_step(engine& own, std::span<const float> gradient) {
  own.begin_step();
  for (std::size_t l = own.used_plan().model().layers(); l-- > 0;) own.ready(l, gradient);
  own.drain();
}

}  // namespace

// What it had posted would be written to after its return.
TEST_CASE("agreement: a rank that gives up leaves no message behind, and its channel has ended") {
  const lamina::layout model = model_of({1, 2});
  const auto talk = [&](collectives::channel& over) {
    std::ignore = collectives::agree_on_order(over, model, both_layers, 20ms);
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
  // A message of another length, and an agreement on another model.
  memory_network network(2);
  const std::vector<std::byte> bytes(8);
  network.of(1).send(0, {{}, bytes});
  CHECK(contains(message_of<channel_error>([&] { talk(network.of(0)); }),
                 "rank 1 sends 8 bytes where 40 are expected"));
  CHECK(contains(message_of<std::logic_error>([&] { talk(network.of(0)); }), "make a new channel"));
  memory_network other(2);
  const auto errors = in_threads(2, [&](std::size_t r) {
    std::ignore = collectives::agree_on_order(other.of(r), model_of({1, 2 + r}), both_layers, 5s);
  });
  CHECK((contains(errors[0], "another plan") || contains(errors[1], "another plan")));
}

TEST_CASE("channel: it has ended once it is abandoned") {
  memory_network network(2);
  std::vector<std::byte> bytes(8);
  network.of(0).send(1, {{}, bytes});
  network.of(0).abandon(nullptr);
  CHECK(network.of(0).progress().empty());
  CHECK(contains(message_of<std::logic_error>([&] {
                   network.of(0).send(1, {{}, bytes});
                 }),
                 "make a new channel"));
  CHECK(contains(message_of<std::logic_error>([&] {
                   network.of(0).receive(1, {{}, bytes});
                 }),
                 "make a new channel"));
}

TEST_CASE("engine: one that has begun no step leaves its channel to the next") {
  const collectives::plan plan = plan_for(model_of({50, 50}), 2, {});
  for (const auto by : {progress_by::thread, progress_by::caller}) {
    memory_network network(2);
    {
      engine unused(network.of(0), plan, {.progress = by});
      if (by == progress_by::caller) CHECK_FALSE(unused.poll());
      if (by == progress_by::thread) std::this_thread::sleep_for(20ms);
    }
    CHECK(network.under_way() == 0);
    const auto errors = in_threads(2, [&](std::size_t r) {
      engine own(network.of(r), plan, {.progress = by, .timeout = 5s});
      run_step(own, std::vector<float>(50, 1.0F));
    });
    CHECK(errors == std::vector<std::string>(2));
  }
}

TEST_CASE("engine: a rank that fails between two steps is named to the others") {
  const collectives::plan plan = plan_for(model_of({50, 50}), 3, {});
  memory_network network(3);
  const auto errors = in_threads(3, [&](std::size_t r) {
    engine own(network.of(r), plan, {.timeout = 20s});
    run_step(own, std::vector<float>(50, 1.0F));
    if (r == 2) throw std::runtime_error("an update has failed");
    run_step(own, std::vector<float>(50, 1.0F));
  });
  CHECK(errors[2] == "an update has failed");
  // One of them waits for rank 2; the other, maybe, for that one.
  for (const std::size_t r : {0U, 1U}) CHECK(contains(errors[r], "has left"));
  CHECK((contains(errors[0], "rank 2 has left") || contains(errors[1], "rank 2 has left")));
}

// It polls, computes for longer than the timeout, and polls: the others had no time to be heard in.
TEST_CASE("engine: time in which a rank did not look is not the silence of others") {
  const collectives::plan plan = plan_for(model_of({50, 50}), 2, {});
  bool is_closed = true;
  memory_network network(
      2, {.interfere = [&](const seen_message&) { return is_closed ? fate::is_held_back : fate::arrives; }});
  const collectives::engine_options options = {.progress = progress_by::caller, .timeout = 60ms};
  engine first(network.of(0), plan, options);
  engine second(network.of(1), plan, options);
  const std::vector<float> gradient(50, 1.0F);
  for (engine* each : {&first, &second}) {
    each->begin_step();
    for (const std::size_t l : both_layers) each->ready(l, gradient);
  }
  std::this_thread::sleep_for(200ms);
  CHECK_FALSE(first.poll());
  std::this_thread::sleep_for(200ms);
  CHECK_FALSE(first.poll());
  is_closed = false;
  for (int k = 0; k < 1000; ++k) {
    first.poll();
    second.poll();
  }
  CHECK(first.is_done(0));
  // While it looks, its patience ends.
  is_closed = true;
  first.begin_step();
  for (const std::size_t l : both_layers) first.ready(l, gradient);
  CHECK(contains(message_of<channel_error>([&] { first.drain(); }), "nothing heard for 0.060 s"));
}

TEST_CASE("timeout: the longest is no time in the past, and none is refused") {
  const collectives::plan plan = plan_for(model_of({50, 50}), 2, {});
  constexpr auto longest = std::chrono::milliseconds::max();
  memory_network network(2);
  const auto errors = in_threads(2, [&](std::size_t r) {
    const lamina::layout model = model_of({50, 50});
    if (r == 0) std::this_thread::sleep_for(5ms);
    std::ignore = collectives::agree_on_order(network.of(r), model, both_layers, longest);
    if (r == 0) std::this_thread::sleep_for(5ms);
    engine own(network.of(r), plan, {.timeout = longest});
    run_step(own, std::vector<float>(50, 1.0F));
  });
  CHECK(errors == std::vector<std::string>(2));
  for (const auto timeout : {0ms, std::chrono::milliseconds(std::chrono::milliseconds::min())}) {
    CHECK(contains(
        message_of<std::invalid_argument>([&] { engine(network.of(0), plan, {.timeout = timeout}); }),
        "a timeout of " + std::to_string(timeout.count()) + " ms: it must be above 0"));
    CHECK(contains(
        message_of<std::invalid_argument>([&] {
          std::ignore = collectives::agree_on_order(network.of(0), model_of({50, 50}), both_layers, timeout);
        }),
        "it must be above 0"));
  }
}
