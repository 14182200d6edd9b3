// SPDX-License-Identifier: MIT
#include "lamina/selection.hpp"

#include <random>

#include "catch.hpp"
#include "support.hpp"

using namespace lamina_test;

TEST_CASE("selection: nothing is selected at first") {
  const lamina::selection chosen(model_of({3, 0, 5}));
  for (std::size_t l = 0; l < 3; ++l) {
    CHECK(chosen.is_dropped(l));
    CHECK_FALSE(chosen.is_sent(l));
  }
  CHECK(chosen.sent_layers() == 0);
  CHECK(chosen.sent_elements() == 0);
  CHECK(chosen.bitmap().size() == 1);
  CHECK(chosen.bitmap()[0] == 0);
}

TEST_CASE("selection: layer l is bit l mod 8 of byte l / 8") {
  const lamina::layout model = model_of(std::vector<std::size_t>(19, 2));
  for (std::size_t l = 0; l < 19; ++l) {
    lamina::selection chosen(model);
    chosen.send(l);
    REQUIRE(chosen.bitmap().size() == 3);
    for (std::size_t byte = 0; byte < 3; ++byte) {
      REQUIRE(chosen.bitmap()[byte] == (byte == l / 8 ? 1U << (l % 8) : 0U));
    }
    for (std::size_t other = 0; other < 19; ++other) REQUIRE(chosen.is_sent(other) == (other == l));
  }
}

TEST_CASE("selection: the bitmap has ceil(L / 8) bytes") {
  CHECK(lamina::selection(model_of({})).bitmap().empty());
  CHECK(lamina::selection(model_of(std::vector<std::size_t>(8, 1))).bitmap().size() == 1);
  CHECK(lamina::selection(model_of(std::vector<std::size_t>(9, 1))).bitmap().size() == 2);
}

TEST_CASE("selection: sending twice counts once, an empty layer never, and clear forgets") {
  lamina::selection chosen(model_of({3, 0, 5}));
  chosen.send(2);
  chosen.send(2);
  chosen.send(1);
  CHECK(chosen.is_sent(2));
  CHECK(chosen.is_dropped(1));
  CHECK(chosen.sent_layers() == 1);
  CHECK(chosen.sent_elements() == 5);
  chosen.clear();
  CHECK(chosen.is_dropped(2));
  CHECK(chosen.sent_layers() == 0);
  CHECK(chosen.sent_elements() == 0);
  CHECK(chosen.bitmap()[0] == 0);
}

TEST_CASE("selection: send_all sends every layer that has elements") {
  lamina::selection chosen(model_of({1, 0, 2}));
  chosen.send(2);
  chosen.send_all();
  CHECK(chosen.is_sent(0));
  CHECK(chosen.is_dropped(1));
  CHECK(chosen.is_sent(2));
  CHECK(chosen.sent_elements() == 3);
}

TEST_CASE("selection: counts agree with the bits") {
  std::mt19937 random(21);
  for (int round = 0; round < 300; ++round) {
    const lamina::layout model = random_model(random);
    std::vector<char> is_wanted(model.layers());
    lamina::selection chosen(model);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      is_wanted[l] = below(random, 2) == 0 ? 1 : 0;
      if (is_wanted[l] != 0) chosen.send(l);
    }
    std::size_t layers = 0;
    std::size_t elements = 0;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      REQUIRE(chosen.is_sent(l) == (is_wanted[l] != 0 && model.sizes()[l] > 0));
      REQUIRE(chosen.is_dropped(l) != chosen.is_sent(l));
      if (!chosen.is_sent(l)) continue;
      ++layers;
      elements += model.sizes()[l];
    }
    REQUIRE(chosen.sent_layers() == layers);
    REQUIRE(chosen.sent_elements() == elements);
  }
}

TEST_CASE("selection: layers that do not exist are refused") {
  lamina::selection chosen(model_of({1, 1, 1}));
  CHECK_THROWS_AS(chosen.send(3), std::out_of_range);
  CHECK_THROWS_AS(chosen.send(8), std::out_of_range);
  CHECK_THROWS_AS(chosen.is_sent(8), std::out_of_range);
  CHECK_THROWS_AS(chosen.is_dropped(1000), std::out_of_range);
  CHECK(chosen.bitmap()[0] == 0);
  CHECK_THROWS_AS(chosen.is_sent(3), std::out_of_range);
}
