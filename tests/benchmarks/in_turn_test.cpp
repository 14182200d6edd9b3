// SPDX-License-Identifier: MIT
// What the benchmarks use in turn is more than the last-level cache holds, and workers choose as in training.
#include <algorithm>
#include <cstddef>
#include <set>
#include <span>
#include <vector>

#include "catch.hpp"
#include "common/in_turn.hpp"
#include "common/model.hpp"
#include "common/senders.hpp"
#include "lamina/codec.hpp"

using namespace lamina_benchmark;

TEST_CASE("in turn: beside each set the others are one and a half times the cache, and two at least") {
  REQUIRE(count_in_turn(100, 1000) == 16);
  REQUIRE(count_in_turn(150, 1000) == 11);
  REQUIRE(count_in_turn(151, 1000) == 11);
  REQUIRE(count_in_turn(1500, 1000) == 2);
  REQUIRE(count_in_turn(100'000, 1000) == 2);
  REQUIRE(count_in_turn(100, 0) == 2);
  REQUIRE(last_level_cache_bytes() > 0);

  // Where sizes differ, it is the largest whose turn comes after the fewest bytes.
  sets_in_turn sets(1000);
  sets.add(1400);
  sets.add(800);
  REQUIRE_FALSE(sets.are_enough());
  sets.add(700);
  REQUIRE(sets.are_enough());
  REQUIRE(sets.count() == 3);
  REQUIRE(sets.bytes() == 2900);
}

TEST_CASE("in turn: no set more than a limit allows, but always one") {
  sets_in_turn sets(1000, 350);
  while (!sets.are_enough()) sets.add(100);
  REQUIRE(sets.bytes() == 300);
  sets_in_turn large(1000, 350);
  REQUIRE_FALSE(large.are_enough());
  large.add(400);
  REQUIRE(large.are_enough());
}

TEST_CASE("in turn: gradients of half the width are as many bytes") {
  const lamina::layout model = equal_layers(3, 1000);
  constexpr std::size_t cache = 50'000;
  const auto floats = gradients_in_turn(model, cache);
  const auto halves = gradients_in_turn<lamina::bfloat16>(model, cache);
  REQUIRE((floats.size() - 1) * 3000 * sizeof(float) >= 75'000);
  REQUIRE((halves.size() - 1) * 3000 * sizeof(lamina::bfloat16) >= 75'000);
  REQUIRE(std::ranges::all_of(halves, [](const auto& each) { return each.size() == 3000; }));
  REQUIRE(lamina::to_float(halves[1][2999]) == Approx(floats[1][2999]).epsilon(0.01));
  REQUIRE(floats[0] != floats[1]);
}

TEST_CASE("in turn: a piece of numbers comes again after more than the cache") {
  constexpr std::size_t cache = 10'000;
  numbers_in_turn numbers(1000, cache);
  REQUIRE(numbers.size_bytes() >= 15'000 + 1000 * sizeof(float));
  std::vector<const float*> pieces;
  std::size_t bytes = 0;
  const float* const first = numbers.next(700);
  for (const float* each = numbers.next(700); each != first; each = numbers.next(700)) {
    pieces.push_back(each);
    bytes += 700 * sizeof(float);
  }
  REQUIRE(bytes >= 15'000 - 700 * sizeof(float));  // at the end there may be no room for one piece more
  REQUIRE(pieces.front() == first + 700);
  REQUIRE(std::ranges::is_sorted(pieces));
}

TEST_CASE("senders: the frames that come in between are one and a half times the cache") {
  const lamina::layout model = equal_layers(40, 500);
  constexpr std::size_t cache = 100'000;
  for (const double drop_ratio : {0.0, 0.9}) {
    senders from(model, drop_ratio, cache);
    for (const std::size_t workers : {1, 3, 64}) {
      INFO(drop_ratio << ", " << workers);
      const std::vector<frames_of_step> steps = from.in_turn(workers);
      REQUIRE(steps.size() >= 2);
      std::size_t bytes = 0;
      std::size_t largest = 0;
      std::set<const std::byte*> places;
      for (const frames_of_step& step : steps) {
        REQUIRE(step.frames.size() == workers);
        bytes += senders::bytes_of(step);
        largest = std::max(largest, senders::bytes_of(step));
        for (const auto& frame : step.frames) places.insert(frame.data());
      }
      REQUIRE(bytes - largest >= cache + cache / 2);
      REQUIRE(places.size() == steps.size() * workers);
    }
  }
}

TEST_CASE("senders: no more memory than is allowed, and the same frames for fewer workers") {
  const lamina::layout model = equal_layers(40, 500);
  senders from(model, 0, 100'000, 1'000'000);
  REQUIRE(from.in_turn(8).size() ==
          1);  // two steps would take 1.28 MB, and eight frames are beyond the cache
  const frames_of_step of_three = from.in_turn(3).front();
  const frames_of_step of_eight = from.in_turn(8).front();
  for (std::size_t w = 0; w < 3; ++w) REQUIRE(of_three.frames[w].data() == of_eight.frames[w].data());
}

TEST_CASE("senders: four workers choose of ResNet-50 as in training") {
  const lamina::layout model = read_model("resnet50");
  senders from(model, 0.95, 10'000'000);
  const std::vector<frames_of_step> steps = from.in_turn(4);
  REQUIRE(steps.size() >= 2);
  double each_sends = 0;
  double together_send = 0;
  std::set<std::vector<bool>> choices;
  for (const frames_of_step& step : steps) {
    // As the server sees it.
    std::vector<bool> in_any(model.layers());
    std::size_t sent = 0;
    std::size_t in_frames = 0;
    for (std::size_t w = 0; w < 4; ++w) {
      const auto frame = lamina::decode<float>(step.frames[w], model);
      REQUIRE(frame.sender() == w);
      REQUIRE(frame.step() == 1);
      std::vector<bool> choice(model.layers());
      for (std::size_t l = 0; l < model.layers(); ++l) {
        if (frame.is_dropped(l)) continue;
        choice[l] = true;
        in_frames += model.sizes()[l];
        if (!in_any[l]) sent += model.sizes()[l];
        in_any[l] = true;
      }
      choices.insert(choice);
    }
    const auto elements = static_cast<double>(model.elements());
    REQUIRE(step.together_send == Approx(static_cast<double>(sent) / elements));
    REQUIRE(step.each_sends == Approx(static_cast<double>(in_frames) / 4 / elements));
    each_sends += step.each_sends / static_cast<double>(steps.size());
    together_send += step.together_send / static_cast<double>(steps.size());
  }
  // In training it was 5.9 and 14.0 %.
  REQUIRE(each_sends > 0.05);
  REQUIRE(each_sends < 0.08);
  REQUIRE(together_send > 0.10);
  REQUIRE(together_send < 0.16);
  REQUIRE(choices.size() >= 3 * steps.size());
}
