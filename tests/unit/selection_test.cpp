// SPDX-License-Identifier: MIT
#include "lamina/selection.hpp"

#include <iterator>

#include "frames.hpp"

namespace lamina_test::selection_test {

static_assert(std::forward_iterator<lamina::selection::sent_iterator>);

TEST_CASE("selection: layer l is bit l mod 8 of byte l / 8, and the walk is over those that are sent") {
  const lamina::layout model = model_of(std::vector<std::size_t>(19, 2));
  for (std::size_t l = 0; l < 19; ++l) {
    lamina::selection chosen(model);
    chosen.send(l);
    REQUIRE(chosen.bitmap().size() == 3);
    for (std::size_t byte = 0; byte < 3; ++byte)
      REQUIRE(chosen.bitmap()[byte] == (byte == l / 8 ? 1U << (l % 8) : 0U));
    chosen.send(7);
    chosen.send(8);
    std::vector<std::size_t> walked(chosen.sent().begin(), chosen.sent().end());
    std::vector<std::size_t> expected;
    for (std::size_t each = 0; each < 19; ++each) {
      if (each == l || each == 7 || each == 8) expected.push_back(each);
      REQUIRE(chosen.is_sent(each) != chosen.is_dropped(each));
      REQUIRE(chosen.is_sent(each) == (!expected.empty() && expected.back() == each));
    }
    REQUIRE(walked == expected);
    REQUIRE(chosen.sent_elements() == 2 * expected.size());
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

TEST_CASE("selection: layers that do not exist are refused") {
  lamina::selection chosen(model_of({1, 1, 1}));
  for (const std::size_t l : {3, 8, 1000}) {
    CHECK_THROWS_AS(chosen.send(l), std::out_of_range);
    CHECK_THROWS_AS(chosen.is_sent(l), std::out_of_range);
    CHECK_THROWS_AS(chosen.is_dropped(l), std::out_of_range);
  }
  CHECK(chosen.bitmap()[0] == 0);
}

TEST_CASE("delivery: everything that was sent has arrived at first, and what is lost is counted once") {
  lamina::delivery arrived(some_of(model_of({10, 7, 0, 4}), {0, 3}), 4);
  CHECK(arrived.is_complete());
  CHECK(arrived.lost_elements() == 0);
  for (const auto& [layer, chunks] : {std::pair{0, 3}, {1, 0}, {2, 0}, {3, 1}})
    CHECK(arrived.chunks(static_cast<std::size_t>(layer)) == static_cast<std::size_t>(chunks));
  for (const std::size_t chunk : {2, 2}) arrived.lose(0, chunk);
  arrived.lose(3, 0);
  CHECK_FALSE(arrived.is_complete());
  CHECK(arrived.is_lost(0, 2));
  CHECK_FALSE(arrived.is_lost(0, 1));
  CHECK(arrived.lost_chunks(0) == 1);
  CHECK(arrived.lost_chunks() == 2);
  CHECK(arrived.lost_elements() == 2 + 4);  // the last chunk by its own length
}

TEST_CASE("delivery: the runs are maximal, ascending, and those of the chunks that were lost") {
  lamina::delivery arrived(some_of(model_of({1, 42}), {1}), 4);
  for (const std::size_t chunk : {0, 3, 4, 6, 9, 10}) arrived.lose(1, chunk);
  using runs = std::vector<std::pair<std::size_t, std::size_t>>;
  runs lost, delivered;
  arrived.for_each_lost(1, [&](std::size_t begin, std::size_t end) { lost.emplace_back(begin, end); });
  arrived.for_each_delivered(1,
                             [&](std::size_t begin, std::size_t end) { delivered.emplace_back(begin, end); });
  CHECK(lost == runs{{0, 4}, {12, 20}, {24, 28}, {36, 42}});
  CHECK(delivered == runs{{4, 12}, {20, 24}, {28, 36}});
}

TEST_CASE("delivery: a chunk larger than any layer, and of one element") {
  lamina::delivery whole(everything(model_of({10, 1})), std::size_t(-1));
  CHECK(whole.chunks(0) == 1);
  whole.lose(0, 0);
  CHECK(whole.lost_elements() == 10);
  CHECK(lamina::delivery(everything(model_of({10, 1})), 1).chunks(0) == 10);
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

}  // namespace lamina_test::selection_test
