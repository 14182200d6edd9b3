// SPDX-License-Identifier: MIT
// What the commit of a frame that arrived in part takes out of a worker, and what it leaves.
#include <array>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "accumulate.hpp"
#include "catch.hpp"
#include "frames.hpp"
#include "lamina/selection.hpp"
#include "steps.hpp"

namespace lamina_test::commit_test {

using lamina::payload_type;

TEMPLATE_TEST_CASE("commit: a layer that was cleared whole, sent again and lost by half keeps that half", "",
                   float, double) {
  const lamina::layout model = model_of({256, 4});
  const auto momentum = GENERATE(0.0, 0.5);
  for (const payload_type payload : payload_types) {
    CAPTURE(momentum, static_cast<int>(payload));
    const lamina::worker_options options{.drop_ratio = 0, .momentum = momentum, .payload = payload};
    lamina::worker<TestType> worker(model, options);
    const auto gradients = [](TestType value) {
      return tensors<TestType>{std::vector<TestType>(256, value), std::vector<TestType>(4, value)};
    };
    send(worker, gradients(64));  // what is in memory now counts as zero
    {
      auto step = worker.add(gradients(3));
      step.frame();
      lamina::delivery arrived(step.sent(), 64);
      arrived.lose(0, 1);
      arrived.lose(0, 2);
      step.commit(arrived);
    }
    const auto check = [&](const auto& each, TestType there, TestType lost) {
      const auto residual = each.residual()[0];
      for (std::size_t i = 0; i < 256; ++i) REQUIRE(residual[i] == (i >= 64 && i < 192 ? lost : there));
    };
    CHECK_FALSE(worker.residual().is_clear(0));
    CHECK(worker.residual().is_clear(1) == (payload == payload_type::as_is));  // it arrived whole
    check(worker, 0, 3);

    lamina::worker<TestType> loaded(model, options);
    loaded.load(worker.save());
    check(loaded, 0, 3);

    // u is 3 where it was lost, and 0 where it was delivered.
    for (auto* each : {&worker, &loaded}) {
      (void)each->add(gradients(2));
      check(*each, 2, 3 + static_cast<TestType>(2 + 3 * momentum));
    }
  }
}

TEMPLATE_TEST_CASE("residual: a range that is cleared of a layer that counts as zero is zero", "", float,
                   double) {
  const auto momentum = GENERATE(0.0, 0.5);
  for (const bool subtracts : {false, true}) {
    lamina::residual_accumulator<TestType> residual(model_of({256}), {.momentum = momentum});
    const auto take = [&] {
      if (subtracts) {
        residual.subtract(0, payload_type::float16, 10, 70);
      } else {
        residual.clear(0, 10, 70);
      }
    };
    take();  // a new one
    CHECK(residual.is_clear(0));
    accumulate(residual, 0, std::vector<TestType>(256, 5));
    residual.clear(0);
    take();  // memory still has what was sent
    CHECK(residual.is_clear(0));
    accumulate(residual, 0, std::vector<TestType>(256, 7));
    CHECK_FALSE(residual.is_clear(0));
    for (const TestType each : residual[0]) REQUIRE(each == 7);
    for (const TestType each : residual.velocity()) REQUIRE(each == 7);
  }
}

TEST_CASE("residual: ranges that are not there are refused, and nothing changes") {
  lamina::residual_accumulator<float> residual(model_of({256, 0}));
  accumulate(residual, 0, std::vector<float>(256, 5));
  CHECK(message_of<std::out_of_range>([&] { residual.clear(0, 200, 257); }) ==
        "elements 200 to 257 of layer 'layer0' are not among its 256");
  CHECK(throws<std::out_of_range>([&] { residual.clear(0, 9, 8); }));
  CHECK(throws<std::out_of_range>([&] { residual.clear(2, 0, 0); }));
  CHECK(throws<std::out_of_range>([&] { residual.subtract(0, payload_type::float16, 0, 257); }));
  CHECK(message_of<std::invalid_argument>([&] { residual.subtract(0, payload_type::int8, 32, 64); }) ==
        "element 32 of layer 'layer0' does not begin a block of the int8 payload");
  residual.clear(0, 256, 256);
  residual.clear(1, 0, 0);
  for (const float each : residual[0]) REQUIRE(each == 5);
}

TEST_CASE("commit: the delivery of another frame is refused by name and changes nothing") {
  const lamina::layout model = model_of({256, 64, 10});
  lamina::worker<float> worker(model, {.drop_ratio = 0.5, .payload = payload_type::int8});
  auto step = worker.add(
      tensors<float>{std::vector<float>(256, 1), std::vector<float>(64, 2), std::vector<float>(10, 9)});
  step.frame();
  const std::vector<float> before = residual_of(worker);
  const auto refuses = [&](const lamina::delivery& arrived, const char* named) {
    CHECK(contains(message_of<std::invalid_argument>([&] { step.commit(arrived); }), named));
    CHECK(residual_of(worker) == before);
  };
  lamina::selection other(model);
  other.send(0);
  refuses(lamina::delivery(other, 64), "the delivery is of another frame");
  lamina::selection same_bits_of_other(model_of({256, 64, 11}));
  for (const std::size_t f : step.sent().sent()) same_bits_of_other.send(f);
  refuses(lamina::delivery(same_bits_of_other, 64), "the delivery is of another frame");
  refuses(lamina::delivery(step.sent(), 96), "a multiple of 64 elements, these have 96");
  CHECK_NOTHROW(step.commit(lamina::delivery(step.sent(), 64)));
}

TEST_CASE("commit: a fragment of which nothing arrived keeps its age, one that arrived in part begins anew") {
  lamina::worker<float> worker(model_of({64, 64}), {.threshold = 1e30, .at_least_every = 4});
  const auto sent_in_step = [&](bool loses_all_of_first) {
    auto step = worker.add(tensors<float>(2, std::vector<float>(64, 1)));
    lamina::delivery arrived(step.select(), 16);
    for (std::size_t chunk = 0; chunk < arrived.chunks(0) && loses_all_of_first; ++chunk)
      arrived.lose(0, chunk);
    for (std::size_t chunk = 1; chunk < arrived.chunks(1); ++chunk) arrived.lose(1, chunk);
    step.commit(arrived);
    return sent_of(step.sent());
  };
  for (int k = 1; k < 4; ++k) REQUIRE(sent_in_step(true) == "00");
  CHECK(sent_in_step(true) == "11");
  CHECK(sent_in_step(true) == "10");
  CHECK(sent_in_step(false) == "10");
  CHECK(sent_in_step(false) == "00");
  CHECK(sent_in_step(false) == "01");
}

TEST_CASE("commit: a budget is charged for what was lost, since it crossed the network") {
  lamina::worker<float> worker(model_of({100, 100}), {.send_budget = 0.25});
  int sent = 0;
  for (int t = 1; t <= 40; ++t) {
    auto step = worker.add(tensors<float>(2, std::vector<float>(100, 1)));
    lamina::delivery arrived(step.select(), 100);
    for (const std::size_t f : step.sent().sent()) {
      arrived.lose(f, 0);
      ++sent;
    }
    step.commit(arrived);
  }
  CHECK(sent == 20);
}

TEMPLATE_TEST_CASE("commit: what was packed is committed by what arrived of it", "", float, double) {
  // The payload is of frames; packed elements are as they are, and their chunks need no multiple of 64.
  for (const payload_type payload : {payload_type::as_is, payload_type::int8, payload_type::ternary}) {
    lamina::worker<TestType> worker(model_of({10, 6}), {.drop_ratio = 0, .payload = payload});
    const auto x = static_cast<TestType>(0.3);
    auto step =
        worker.add(tensors<TestType>{std::vector<TestType>(10, x), std::vector<TestType>(6, TestType(0.7))});
    std::vector<TestType> packed;
    step.select();
    step.pack(packed);
    lamina::delivery arrived(step.sent(), 3);
    arrived.lose(0, 1);
    arrived.lose(0, 3);
    step.commit(arrived);
    CHECK(same_bits(worker.residual()[0], std::vector<TestType>{0, 0, 0, x, x, x, 0, 0, 0, x}));
    CHECK(same_bits(worker.residual()[1], std::vector<TestType>(6)));
  }
}

TEST_CASE("commit: of what is packed in half the bytes the lost chunks stay as they were") {
  lamina::worker<float> worker(model_of({10}), {.drop_ratio = 0, .payload = payload_type::bfloat16});
  const float x = 1 + 0x1p-12F;
  auto step = worker.add(tensors<float>{std::vector<float>(10, x)});
  std::vector<lamina::bfloat16> packed;
  step.select();
  step.pack(packed);
  lamina::delivery arrived(step.sent(), 3);
  arrived.lose(0, 1);
  step.commit(arrived);
  const float y = 0x1p-12F;
  CHECK(residual_of(worker) == std::vector<float>{y, y, y, x, x, x, y, y, y, y});
}

}  // namespace lamina_test::commit_test
