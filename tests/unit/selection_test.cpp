// SPDX-License-Identifier: MIT
#include "lamina/selection.hpp"

#include <algorithm>
#include <iterator>
#include <random>
#include <vector>

#include "catch.hpp"
#include "steps.hpp"

namespace lamina_test::selection_test {

static_assert(std::forward_iterator<lamina::selection::sent_iterator>);

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

TEST_CASE("selection: a layer counts once, an empty one never, and clear forgets all") {
  lamina::selection chosen(model_of({3, 0, 5}));
  const auto is_empty = [&] {
    return sent_of(chosen) == "000" && chosen.sent_layers() == 0 && chosen.sent_elements() == 0;
  };
  CHECK(is_empty());
  for (const std::size_t l : {2, 2, 1}) chosen.send(l);
  CHECK(sent_of(chosen) == "001");
  CHECK(chosen.sent_layers() == 1);
  CHECK(chosen.sent_elements() == 5);
  chosen.send_all();
  CHECK(sent_of(chosen) == "101");
  CHECK(chosen.sent_elements() == 8);
  chosen.clear();
  CHECK(is_empty());
}

TEST_CASE("selection: counts and the walk agree with the bits") {
  std::mt19937 random(21);
  for (int round = 0; round < 300; ++round) {
    const lamina::layout model = random_model(random);
    lamina::selection chosen(model);
    std::vector<std::size_t> expected;
    std::size_t elements = 0;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (below(random, 5) < 2) continue;
      chosen.send(l);
      if (model.sizes()[l] == 0) continue;
      expected.push_back(l);
      elements += model.sizes()[l];
    }
    std::vector<std::size_t> walked;
    for (const std::size_t l : chosen.sent()) walked.push_back(l);
    REQUIRE(walked == expected);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      REQUIRE(chosen.is_sent(l) == std::ranges::binary_search(expected, l));
      REQUIRE(chosen.is_dropped(l) != chosen.is_sent(l));
    }
    REQUIRE(chosen.sent_layers() == expected.size());
    REQUIRE(chosen.sent_elements() == elements);
  }
}

TEST_CASE("selection: layers that do not exist are refused") {
  lamina::selection chosen(model_of({1, 1, 1}));
  for (const std::size_t l : {3, 8, 1000}) {
    CHECK_THROWS_AS(chosen.send(l), std::out_of_range);
    CHECK_THROWS_AS(chosen.is_sent(l), std::out_of_range);
    CHECK_THROWS_AS(chosen.is_dropped(l), std::out_of_range);
  }
  CHECK(chosen.bitmap()[0] == 0);
}

}  // namespace lamina_test::selection_test
