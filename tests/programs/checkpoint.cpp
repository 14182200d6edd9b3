// SPDX-License-Identifier: MIT
// A checkpoint: a worker that was saved and loaded goes on bitwise as the one that was not.
#include <lamina/worker.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "catch.hpp"
#include "training.hpp"

namespace lamina_test::checkpoint {

namespace {

std::vector<std::byte> a_step(lamina::worker<float>& worker) {
  auto step = worker.add(gradients_of(worker.model(), 0, worker.steps() + 1));
  std::vector<std::byte> bytes = step.frame().to_bytes();
  step.commit();
  return bytes;
}

}  // namespace

TEST_CASE("program: a checkpoint of a worker is resumed exactly") {
  const lamina::layout model = small_model();
  const lamina::worker_options options{
      .warm_up_steps = 8, .send_budget = 0.2, .at_least_every = 5, .momentum = 0.5};
  lamina::worker<float> worker(model, options);
  for (int t = 0; t < 4; ++t) a_step(worker);
  const std::vector<std::byte> bytes = worker.save();

  lamina::worker<float> again(model, options);
  again.load(bytes);
  REQUIRE(again.steps() == 4);
  for (int t = 0; t < 8; ++t) REQUIRE(a_step(again) == a_step(worker));
  REQUIRE(again.save() == worker.save());
}

TEST_CASE("program: a checkpoint that is damaged or of another model is refused without effect") {
  const lamina::layout model = small_model();
  lamina::worker<float> worker(model);
  a_step(worker);
  const std::vector<std::byte> before = worker.save();
  for (const std::size_t at : {std::size_t{0}, std::size_t{40}, before.size() / 2, before.size() - 1}) {
    std::vector<std::byte> damaged = before;
    damaged[at] ^= std::byte{4};
    REQUIRE_THROWS_AS(worker.load(damaged), lamina::decode_error);
    REQUIRE(worker.save() == before);
  }
  REQUIRE_THROWS_AS(worker.load(std::span(before).first(before.size() - 4)), lamina::decode_error);
  lamina::worker<float> other(lamina::layout({{"another", {6}}}));
  REQUIRE_THROWS_AS(other.load(before), lamina::decode_error);
  REQUIRE(worker.save() == before);
}

}  // namespace lamina_test::checkpoint
