// SPDX-License-Identifier: MIT
// Fragments shared out among owners, and what of their frames was lost.
#include <stdexcept>

#include "catch.hpp"
#include "lamina/delivery.hpp"
#include "lamina/selection.hpp"
#include "support.hpp"

using lamina::delivery;
using lamina::selection;
using lamina_test::contains;
using lamina_test::message_of;
using lamina_test::model_of;

namespace {

// Fragment f is of owner f mod 2.
selection shard_of(const selection& sent, std::size_t owner) {
  selection shard(sent.model());
  for (const std::size_t f : sent.sent()) {
    if (f % 2 == owner) shard.send(f);
  }
  return shard;
}

}  // namespace

TEST_CASE("shard: what was lost of the shards was lost of the whole") {
  const lamina::layout model = model_of({130, 64, 200});
  selection sent(model);
  sent.send_all();
  delivery whole(sent, 64);
  delivery first(shard_of(sent, 0), 64);
  first.lose(0, 2);
  first.lose(2, 0);
  delivery second(shard_of(sent, 1), 64);
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
