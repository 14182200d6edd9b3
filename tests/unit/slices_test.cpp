// SPDX-License-Identifier: MIT
#include "lamina/slices.hpp"

#include <algorithm>
#include <random>
#include <vector>

#include "catch.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::delivery;
using lamina::part_slices;
using lamina::selection;

namespace {

selection some_of(std::mt19937& random, const lamina::layout& model) {
  selection chosen(model);
  for (std::size_t part = 0; part < model.layers(); ++part) {
    if (below(random, 4) != 0) chosen.send(part);
  }
  return chosen;
}

}  // namespace

TEST_CASE("slices: each element has one owner, in whole units, and the shares are even") {
  std::mt19937 random(31);
  for (int round = 0; round < 200; ++round) {
    const lamina::layout model = random_model(random);
    const std::size_t owners = 1 + below(random, 7);
    const std::size_t unit = 1 + below(random, 9);
    const part_slices slices(model, owners, unit);
    for (std::size_t part = 0; part < model.layers(); ++part) {
      const std::size_t elements = model.sizes()[part];
      std::vector<unsigned> owned(elements);
      std::vector<std::size_t> units;
      for (std::size_t owner = 0; owner < owners; ++owner) {
        const std::size_t begin = slices.begin(owner, part);
        const std::size_t size = slices.of(owner).sizes()[part];
        if (size == 0) {
          units.push_back(0);
          continue;
        }
        REQUIRE(begin % unit == 0);
        REQUIRE((size % unit == 0 || begin + size == elements));
        for (std::size_t i = begin; i < begin + size; ++i) ++owned.at(i);
        units.push_back((size + unit - 1) / unit);
      }
      REQUIRE(std::ranges::all_of(owned, [](unsigned each) { return each == 1; }));
      REQUIRE(std::ranges::max(units) <= std::ranges::min(units) + 1);
    }
  }
}

TEST_CASE("slices: small parts go to one owner after the other") {
  const part_slices slices(model_of({5, 5, 5, 5}), 4, 8);
  for (std::size_t owner = 0; owner < 4; ++owner) CHECK(slices.of(owner).elements() == 5);
}

TEST_CASE("slices: what owners lack of their slices is what is lost of the parts, and no more") {
  std::mt19937 random(32);
  for (int round = 0; round < 200; ++round) {
    const lamina::layout model = random_model(random);
    const std::size_t chunk = 1 + below(random, 9);
    const part_slices slices(model, 1 + below(random, 5), chunk * (1 + below(random, 3)));
    const selection chosen = some_of(random, model);
    delivery arrived(chosen, chunk);
    std::vector<std::vector<char>> is_lost;  // of each element
    for (const std::size_t size : model.sizes()) is_lost.emplace_back(size);
    const std::size_t whole =
        below(random, 2 * slices.owners());  // of an owner to whom nothing came, or none
    for (std::size_t owner = 0; owner < slices.owners(); ++owner) {
      const selection sent = slices.cut(chosen, owner);
      delivery of_slices(sent, chunk);
      for (const std::size_t part : sent.sent()) {
        const std::size_t size = slices.of(owner).sizes()[part];
        for (std::size_t c = 0; c < of_slices.chunks(part); ++c) {
          if (owner != whole && below(random, 3) != 0) continue;
          of_slices.lose(part, c);
          for (std::size_t i = c * chunk; i < std::min((c + 1) * chunk, size); ++i)
            is_lost[part][slices.begin(owner, part) + i] = 1;
        }
      }
      slices.lose(owner, of_slices, arrived);
    }
    std::size_t lost = 0;
    for (std::size_t part = 0; part < model.layers(); ++part) {
      std::vector<char> found(model.sizes()[part]);
      if (chosen.is_sent(part)) {
        arrived.for_each_lost(part, [&](std::size_t begin, std::size_t end) {
          std::fill_n(&found[begin], end - begin, char{1});
        });
      }
      REQUIRE(found == is_lost[part]);
      lost += static_cast<std::size_t>(std::ranges::count(found, char{1}));
    }
    REQUIRE(arrived.lost_elements() == lost);
  }
}

TEST_CASE("slices: a cut has the slices of what is sent, without empty ones") {
  selection chosen(model_of({16, 3, 16, 0}));
  chosen.send(0);
  chosen.send(1);
  const part_slices slices(chosen.model(), 2, 8);
  const selection first = slices.cut(chosen, 0);
  const selection second = slices.cut(chosen, 1);
  CHECK(first.model().fingerprint() == slices.of(0).fingerprint());
  CHECK(first.is_sent(0));
  CHECK(second.is_sent(0));
  CHECK(first.is_sent(1) != second.is_sent(1));
  CHECK_FALSE(first.is_sent(2));
  CHECK(first.sent_elements() + second.sent_elements() == chosen.sent_elements());
}

TEST_CASE("slices: what cannot be meant is refused, and changes nothing") {
  const lamina::layout model = model_of({16, 32});
  CHECK(throws<std::invalid_argument>([&] { part_slices(model, 0, 8); }));
  CHECK(throws<std::invalid_argument>([&] { part_slices(model, 2, 0); }));
  const part_slices slices(model, 2, 8);
  CHECK(throws<std::out_of_range>([&] { (void)slices.of(2); }));
  CHECK(throws<std::out_of_range>([&] { (void)slices.begin(2, 0); }));
  CHECK(throws<std::out_of_range>([&] { (void)slices.begin(0, 2); }));

  selection chosen(model);
  chosen.send_all();
  CHECK(contains(message_of<std::out_of_range>([&] { (void)slices.cut(chosen, 2); }),
                 "owner 2 is out of range"));
  CHECK(throws<std::invalid_argument>([&] { (void)slices.cut(selection(model_of({16})), 0); }));

  delivery arrived(chosen, 8);
  const auto lost_whole = [](const selection& sent, std::size_t chunk) {
    delivery lost(sent, chunk);
    for (const std::size_t part : sent.sent()) {
      for (std::size_t c = 0; c < lost.chunks(part); ++c) lost.lose(part, c);
    }
    return lost;
  };
  const auto refused = [&](std::size_t owner, const delivery& of_slices) {
    return message_of<std::invalid_argument>([&] { slices.lose(owner, of_slices, arrived); });
  };
  // Both owners have slices of the same sizes; one has not the other's.
  REQUIRE(std::ranges::equal(slices.of(0).sizes(), slices.of(1).sizes()));
  CHECK(contains(refused(0, lost_whole(slices.cut(chosen, 1), 8)), "of another frame"));
  selection fewer(model);
  fewer.send(0);
  CHECK(contains(refused(0, lost_whole(slices.cut(fewer, 0), 8)), "of another frame"));
  CHECK(contains(refused(0, lost_whole(slices.cut(chosen, 0), 4)),
                 "chunks of 4 elements of slices, and of 8 of parts"));
  CHECK(arrived.is_complete());
  delivery in_three(chosen, 3);
  CHECK(contains(message_of<std::invalid_argument>(
                     [&] { slices.lose(0, lost_whole(slices.cut(chosen, 0), 3), in_three); }),
                 "in units of 8"));
}
