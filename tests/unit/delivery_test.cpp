// SPDX-License-Identifier: MIT
#include "lamina/selection.hpp"

#include <array>
#include <random>
#include <vector>

#include "catch.hpp"
#include "support.hpp"

namespace lamina_test::delivery_test {

namespace {

lamina::selection all_of(const lamina::layout& model) {
  lamina::selection chosen(model);
  chosen.send_all();
  return chosen;
}

}  // namespace

TEST_CASE("delivery: everything that was sent has arrived at first") {
  lamina::selection chosen(model_of({10, 7, 0, 4}));
  chosen.send(0);
  chosen.send(3);
  const lamina::delivery arrived(chosen, 4);
  CHECK(arrived.is_complete());
  CHECK(arrived.chunk_elements() == 4);
  CHECK(arrived.lost_chunks() == 0);
  CHECK(arrived.lost_elements() == 0);
  CHECK(arrived.sent().bitmap()[0] == chosen.bitmap()[0]);
  // 4 + 4 + 2, not sent, empty, 4.
  CHECK(arrived.chunks(0) == 3);
  CHECK(arrived.chunks(1) == 0);
  CHECK(arrived.chunks(2) == 0);
  CHECK(arrived.chunks(3) == 1);
}

TEST_CASE("delivery: what is lost is counted once, the last chunk of a layer by its own length") {
  lamina::delivery arrived(all_of(model_of({10, 4})), 4);
  arrived.lose(0, 2);
  arrived.lose(0, 2);
  arrived.lose(1, 0);
  CHECK_FALSE(arrived.is_complete());
  CHECK(arrived.is_lost(0, 2));
  CHECK_FALSE(arrived.is_lost(0, 1));
  CHECK(arrived.lost_chunks(0) == 1);
  CHECK(arrived.lost_chunks(1) == 1);
  CHECK(arrived.lost_chunks() == 2);
  CHECK(arrived.lost_elements() == 2 + 4);
}

TEST_CASE("delivery: the runs are maximal, ascending, and those of a list of lost chunks") {
  std::mt19937 random(21);
  for (int round = 0; round < 400; ++round) {
    const lamina::layout model = random_model(random);
    lamina::selection chosen(model);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (below(random, 4) != 0) chosen.send(l);
    }
    const std::size_t chunk = 1 + below(random, 9);
    lamina::delivery arrived(chosen, chunk);
    const std::size_t lost_of_8 = below(random, 9);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      std::array<std::vector<lamina::element_range>, 2> expected;  // that arrived, and that were lost
      for (std::size_t c = 0; c < arrived.chunks(l); ++c) {
        const bool is_lost = below(random, 8) < lost_of_8;
        if (is_lost) arrived.lose(l, c);
        const std::size_t end = std::min((c + 1) * chunk, model.sizes()[l]);
        auto& runs = expected[is_lost ? 1 : 0];
        if (!runs.empty() && runs.back().end == c * chunk) {
          runs.back().end = end;
        } else {
          runs.push_back({l, c * chunk, end});
        }
      }
      std::array<std::vector<lamina::element_range>, 2> found;
      arrived.for_each_delivered(l, [&](std::size_t begin, std::size_t end) {
        found[0].push_back({l, begin, end});
      });
      arrived.for_each_lost(l, [&](std::size_t begin, std::size_t end) {
        found[1].push_back({l, begin, end});
      });
      REQUIRE(found == expected);
    }
  }
}

TEST_CASE("delivery: a chunk larger than any layer, and of one element") {
  lamina::delivery whole(all_of(model_of({10, 1})), std::size_t(-1));
  CHECK(whole.chunks(0) == 1);
  whole.lose(0, 0);
  CHECK(whole.lost_elements() == 10);
  whole.for_each_lost(0, [](std::size_t begin, std::size_t end) {
    CHECK(begin == 0);
    CHECK(end == 10);
  });
  CHECK(lamina::delivery(all_of(model_of({10, 1})), 1).chunks(0) == 10);
}

TEST_CASE("delivery: what cannot be is refused by name, and changes nothing") {
  lamina::selection chosen(model_of({10, 5}));
  chosen.send(0);
  lamina::delivery arrived(chosen, 4);
  CHECK(message_of<std::out_of_range>([&] { arrived.lose(0, 3); }) ==
        "chunk 3 is out of range: layer 'layer0' was sent in 3");
  CHECK(message_of<std::invalid_argument>([&] { arrived.lose(1, 0); }) == "layer 'layer1' was not sent");
  CHECK(throws<std::out_of_range>([&] { arrived.lose(2, 0); }));
  CHECK(throws<std::out_of_range>([&] { (void)arrived.is_lost(0, 3); }));
  CHECK(throws<std::invalid_argument>([&] { (void)arrived.is_lost(1, 0); }));
  CHECK(throws<std::out_of_range>([&] { (void)arrived.chunks(2); }));
  CHECK(throws<std::out_of_range>([&] { (void)arrived.lost_chunks(2); }));
  CHECK(throws<std::out_of_range>([&] { arrived.for_each_lost(2, [](std::size_t, std::size_t) {}); }));
  CHECK(throws<std::invalid_argument>([&] { lamina::delivery(chosen, 0); }));
  CHECK(arrived.is_complete());
}

}  // namespace lamina_test::delivery_test
