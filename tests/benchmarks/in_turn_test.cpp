// SPDX-License-Identifier: MIT
// What the benchmarks use in turn is more than the last-level cache holds, workers choose as in training, and models are the real ones.
#include <algorithm>
#include <cstddef>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "catch.hpp"
#include "common/in_turn.hpp"
#include "common/model.hpp"
#include "common/senders.hpp"
#include "lamina/codec.hpp"

using namespace lamina_benchmark;

TEST_CASE("in turn: besides each set the others are one and a half times the cache, and two at least") {
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

  // No more than a limit allows, but always one.
  sets_in_turn limited(1000, 350);
  while (!limited.are_enough()) limited.add(100);
  REQUIRE(limited.bytes() == 300);
  sets_in_turn large(1000, 350);
  REQUIRE_FALSE(large.are_enough());
  large.add(400);
  REQUIRE(large.are_enough());
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
    double in_frames = 0;
    double sent = 0;
    for (std::size_t w = 0; w < 4; ++w) {
      const auto frame = lamina::decode<float>(step.frames[w], model);
      REQUIRE((frame.sender() == w && frame.step() == 1));
      std::vector<bool> choice(model.layers());
      for (std::size_t l = 0; l < model.layers(); ++l) {
        if (frame.is_dropped(l)) continue;
        const double share = static_cast<double>(model.sizes()[l]) / static_cast<double>(model.elements());
        in_frames += share / 4;
        sent += in_any[l] ? 0 : share;
        choice[l] = in_any[l] = true;
      }
      choices.insert(choice);
    }
    REQUIRE(step.together_send == Approx(sent));
    REQUIRE(step.each_sends == Approx(in_frames));
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

TEST_CASE("models: layers and elements are those of the published models") {
  struct published {
    std::string name;
    std::size_t layers, elements, largest;
  };
  // As torchvision and transformers count them; largest is fc1 of VGG-16 and the embeddings of the other two.
  const std::vector<published> expected = {{"resnet50", 161, 25'557'032, 512 * 512 * 9},
                                           {"vgg16", 32, 138'357'544, 25'088 * 4'096},
                                           {"bert_base", 199, 109'482'240, 30'522 * 768},
                                           {"gpt2", 148, 124'439'808, 50'257 * 768}};
  for (const published& each : expected) {
    INFO(each.name);
    const lamina::layout model = read_model(each.name);
    REQUIRE(model.layers() == each.layers);
    REQUIRE(model.elements() == each.elements);
    REQUIRE(std::ranges::max(model.sizes()) == each.largest);
  }
  REQUIRE_THROWS_WITH(read_model("alexnet"), Catch::Contains("alexnet.txt"));
}
