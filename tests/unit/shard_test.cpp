// SPDX-License-Identifier: MIT
// Fragments shared out among owners, and what of their frames was lost.
#include <stdexcept>

#include "catch.hpp"
#include "lamina/delivery.hpp"
#include "lamina/selection.hpp"
#include "support.hpp"

using lamina::delivery;
using lamina::selection;
using lamina::shard_of;
using lamina_test::contains;
using lamina_test::message_of;
using lamina_test::model_of;

TEST_CASE("shard: every fragment that is sent has one owner") {
  const lamina::layout model = model_of({5, 0, 9, 130, 1, 64, 7});
  selection sent(model);
  for (const std::size_t f : {0, 2, 3, 5, 6}) sent.send(static_cast<std::size_t>(f));
  for (const std::size_t owners : {1, 2, 3, 256}) {
    selection all(model);
    std::size_t elements = 0;
    for (std::size_t owner = 0; owner < owners; ++owner) {
      const selection shard = shard_of(sent, owner, owners);
      for (const std::size_t f : shard.sent()) {
        CHECK(f % owners == owner);
        CHECK(all.is_dropped(f));
        all.send(f);
      }
      elements += shard.sent_elements();
    }
    CHECK(std::ranges::equal(all.bitmap(), sent.bitmap()));
    CHECK(elements == sent.sent_elements());
  }
  CHECK(message_of<std::out_of_range>([&] { (void)shard_of(sent, 2, 2); }) ==
        "owner 2 is out of range: there are 2");
  CHECK_THROWS_AS((void)shard_of(sent, 0, 0), std::out_of_range);
}

TEST_CASE("shard: what was lost of the shards was lost of the whole") {
  const lamina::layout model = model_of({130, 64, 200});
  selection sent(model);
  sent.send_all();
  delivery whole(sent, 64);
  delivery first(shard_of(sent, 0, 2), 64);
  first.lose(0, 2);
  first.lose(2, 0);
  delivery second(shard_of(sent, 1, 2), 64);
  second.lose(1, 0);
  whole.lose(first);
  CHECK(whole.lost_elements() == 2 + 64);
  whole.lose(second);
  whole.lose(second);  // said twice
  CHECK(whole.lost_chunks() == 3);
  CHECK((whole.is_lost(0, 2) && whole.is_lost(1, 0) && whole.is_lost(2, 0)));

  selection fewer(model);
  fewer.send(1);
  delivery of_fewer(fewer, 64);
  const auto refused = [&](const delivery& other) {
    return message_of<std::invalid_argument>([&] { of_fewer.lose(other); });
  };
  CHECK(contains(refused(first), "other layers"));
  delivery in_halves(fewer, 32);
  in_halves.lose(1, 0);
  CHECK(contains(refused(in_halves), "chunks of another size"));
  CHECK(contains(refused(delivery(selection(model_of({130})), 64)), "other layers"));
  CHECK(of_fewer.is_complete());
}
