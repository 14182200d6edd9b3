// SPDX-License-Identifier: MIT
// A worker takes over what its server replies.
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <lamina/worker.hpp>

#include <vector>

#include "catch.hpp"

TEST_CASE("program: a worker takes the reply of the step that comes next, between steps, and no other") {
  using tensors = std::vector<std::vector<float>>;
  const lamina::layout model({{"embedding", {400, 16}}, {"head", {10}}});
  const tensors parameters = {std::vector<float>(6400, 0.5F), std::vector<float>(10, 2)};
  lamina::server<float> server(model, {.run = 7});
  const auto reply = server.reply(0, parameters).to_bytes();
  tensors replica = {std::vector<float>(6400), std::vector<float>(10)};
  const tensors before = replica;

  lamina::worker<float> of_another_run(model);
  REQUIRE_THROWS_AS(of_another_run.apply(reply, replica), lamina::decode_error);
  lamina::worker<float> worker(model, {.run = 7});
  worker.skip_to(2);
  REQUIRE_THROWS_AS(worker.apply(reply, replica), lamina::decode_error);
  lamina::worker<float> in_time(model, {.run = 7});
  {
    auto step = in_time.begin();
    REQUIRE_THROWS_AS(in_time.apply(reply, replica), std::logic_error);
  }
  REQUIRE(replica == before);
  REQUIRE(in_time.apply(reply, replica) == model.elements());
  REQUIRE(replica == parameters);
}
