// SPDX-License-Identifier: MIT
// What the commit of a frame that arrived in part takes out of a worker, and what it leaves.
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::compressor_options;
using lamina::decision_timing;
using lamina::payload_type;

TEMPLATE_TEST_CASE("worker: a part that was cleared whole, sent again and lost by half keeps that half", "",
                   float, double) {
  const lamina::layout model = model_of({256, 4});
  const auto momentum = GENERATE(0.0, 0.5);
  for (const payload_type payload : {payload_type::as_is, payload_type::float16, payload_type::bfloat16,
                                     payload_type::int8, payload_type::int4}) {
    CAPTURE(momentum, static_cast<int>(payload));
    const compressor_options options{.drop_ratio = 0, .momentum = momentum, .payload = payload};
    lamina::gradient_compressor<TestType> compressor(model, options);
    const auto accumulate = [&](TestType value) {
      compressor.accumulate(0, std::vector<TestType>(256, value));
      compressor.accumulate(1, std::vector<TestType>(4, value));
    };
    accumulate(64);
    compressor.encode();
    compressor.commit();  // what is in memory now counts as zero

    accumulate(3);
    compressor.encode();
    lamina::delivery arrived(compressor.chosen(), 64);
    arrived.lose(0, 1);
    arrived.lose(0, 2);
    compressor.commit(arrived);
    const auto check = [&](const auto& each, TestType there, TestType lost) {
      const auto residual = each.residual()[0];
      for (std::size_t i = 0; i < 256; ++i) REQUIRE(residual[i] == (i >= 64 && i < 192 ? lost : there));
    };
    CHECK_FALSE(compressor.residual().is_clear(0));
    CHECK(compressor.residual().is_clear(1) == (payload == payload_type::as_is));  // it arrived whole
    check(compressor, 0, 3);

    lamina::gradient_compressor<TestType> loaded(model, options);
    loaded.load(compressor.save());
    check(loaded, 0, 3);

    accumulate(2);
    // u is 3 where it was lost, and 0 where it was delivered.
    const auto added = static_cast<TestType>(2 + 3 * momentum);
    check(compressor, 2, 3 + added);
    loaded.accumulate(0, std::vector<TestType>(256, 2));
    loaded.accumulate(1, std::vector<TestType>(4, 2));
    check(loaded, 2, 3 + added);
  }
}

TEMPLATE_TEST_CASE("residual: a range that is cleared of a layer that counts as zero is zero", "", float,
                   double) {
  const auto momentum = GENERATE(0.0, 0.5);
  const std::vector<std::byte> halves(256 * 2);  // of zeros
  for (const bool subtracts : {false, true}) {
    lamina::residual_accumulator<TestType> residual(model_of({256}), {.momentum = momentum});
    const auto take = [&] {
      if (subtracts) {
        residual.subtract(0, payload_type::float16, halves.data(), 10, 70);
      } else {
        residual.clear(0, 10, 70);
      }
    };
    take();  // a new one
    CHECK(residual.is_clear(0));
    residual.accumulate(0, std::vector<TestType>(256, 5));
    residual.clear(0);
    take();  // memory still has what was sent
    CHECK(residual.is_clear(0));
    residual.accumulate(0, std::vector<TestType>(256, 7));
    CHECK_FALSE(residual.is_clear(0));
    for (const TestType each : residual[0]) REQUIRE(each == 7);
    for (const TestType each : residual.velocity()) REQUIRE(each == 7);
  }
}

TEST_CASE("residual: of ranges those that are not there are refused, and nothing changes") {
  lamina::residual_accumulator<float> residual(model_of({256, 0}));
  residual.accumulate(0, std::vector<float>(256, 5));
  const std::vector<std::byte> payload(256 * 2, std::byte{1});
  CHECK(message_of<std::out_of_range>([&] { residual.clear(0, 200, 257); }) ==
        "elements 200 to 257 of layer 'layer0' are not among its 256");
  CHECK(throws<std::out_of_range>([&] { residual.clear(0, 9, 8); }));
  CHECK(throws<std::out_of_range>([&] { residual.clear(2, 0, 0); }));
  CHECK(throws<std::out_of_range>(
      [&] { residual.subtract(0, payload_type::float16, payload.data(), 0, 257); }));
  CHECK(message_of<std::invalid_argument>([&] {
          residual.subtract(0, payload_type::int8, payload.data(), 32, 64);
        }) == "element 32 of layer 'layer0' does not begin a block of the int8 payload");
  residual.clear(0, 256, 256);
  residual.clear(1, 0, 0);
  for (const float each : residual[0]) REQUIRE(each == 5);
}

TEMPLATE_TEST_CASE("residual: a large number that was lost is not forgotten when the rest is cleared", "",
                   float, double) {
  const TestType much = std::numeric_limits<TestType>::max() * TestType(0.6);
  const std::vector<std::byte> nothing(128 * 2);  // a payload of zeros
  for (const bool subtracts : {false, true}) {
    lamina::residual_accumulator<TestType> residual(model_of({128}), {.momentum = 0.99});
    residual.begin_step();
    residual.accumulate(0, std::vector<TestType>(128, much));
    if (subtracts) {
      residual.subtract(0, payload_type::bfloat16, nothing.data(), 0, 64);
    } else {
      residual.clear(0, 0, 64);
    }
    residual.begin_step();
    // u = 0.594 and a = 1.194 of the largest, where it was lost.
    CHECK_THROWS_AS(residual.accumulate(0, std::vector<TestType>(128)), lamina::non_finite_gradient);
    CHECK(residual[0][127] == much);
    CHECK(residual.velocity()[127] == much);
    CHECK(residual.velocity()[0] == 0);
  }
}

TEST_CASE("worker: the delivery of another frame is refused by name and changes nothing") {
  const lamina::layout model = model_of({256, 64, 10});
  lamina::gradient_compressor<float> compressor(model, {.drop_ratio = 0.5, .payload = payload_type::int8});
  const auto refuses = [&](const lamina::delivery& arrived, const std::string& part) {
    const auto before = compressor.save();
    CHECK(contains(message_of<std::invalid_argument>([&] { compressor.commit(arrived); }), part));
    CHECK(compressor.save() == before);
  };
  CHECK(throws<std::logic_error>([&] { compressor.commit(lamina::delivery(compressor.chosen(), 64)); }));
  compressor.accumulate(0, std::vector<float>(256, 1));
  compressor.accumulate(1, std::vector<float>(64, 2));
  compressor.accumulate(2, std::vector<float>(10, 9));
  CHECK(throws<std::logic_error>([&] { compressor.commit(lamina::delivery(compressor.chosen(), 64)); }));
  compressor.encode();
  const lamina::delivery right(compressor.chosen(), 64);

  lamina::selection other(model);
  other.send(0);
  refuses(lamina::delivery(other, 64), "the delivery is of another frame");
  lamina::selection same_bits_of_other(model_of({256, 64, 11}));
  for (const std::size_t part : compressor.chosen().sent()) same_bits_of_other.send(part);
  refuses(lamina::delivery(same_bits_of_other, 64), "the delivery is of another frame");
  refuses(lamina::delivery(compressor.chosen(), 96), "a multiple of 64 elements, these have 96");
  compressor.commit(right);
  CHECK(throws<std::logic_error>([&] { compressor.commit(right); }));
  CHECK(throws<std::logic_error>([&] { compressor.commit(); }));
}

TEST_CASE("worker: a part of which nothing arrived keeps its age, one that arrived in part rests") {
  const lamina::layout model = model_of({64, 64});
  // Nothing goes out but for its age.
  lamina::gradient_compressor<float> compressor(
      model, {.refresh = lamina::refresh_schedule::fixed(1e30), .max_age = 4});
  const auto step = [&](bool loses_all_of_first) {
    for (std::size_t l = 0; l < 2; ++l) compressor.accumulate(l, std::vector<float>(64, 1));
    compressor.encode();
    lamina::delivery arrived(compressor.chosen(), 16);
    const auto sent = std::pair(compressor.is_sent(0), compressor.is_sent(1));
    for (std::size_t chunk = 0; chunk < arrived.chunks(0) && loses_all_of_first; ++chunk)
      arrived.lose(0, chunk);
    for (std::size_t chunk = 1; chunk < arrived.chunks(1); ++chunk) arrived.lose(1, chunk);
    compressor.commit(arrived);
    return sent;
  };
  for (int k = 1; k < 4; ++k) REQUIRE(step(true) == std::pair(false, false));
  CHECK(step(true) == std::pair(true, true));
  CHECK(step(true) == std::pair(true, false));
  CHECK(step(false) == std::pair(true, false));
  CHECK(step(false) == std::pair(false, false));
  CHECK(step(false) == std::pair(false, true));
}

TEST_CASE("worker: a budget is charged for what was lost, since it crossed the network") {
  lamina::gradient_compressor<float> compressor(model_of({100, 100}), {.byte_budget = 0.25});
  int sent = 0;
  for (int step = 1; step <= 40; ++step) {
    for (std::size_t l = 0; l < 2; ++l) compressor.accumulate(l, std::vector<float>(100, 1));
    compressor.encode();
    lamina::delivery arrived(compressor.chosen(), 100);
    for (const std::size_t part : compressor.chosen().sent()) {
      arrived.lose(part, 0);
      ++sent;
    }
    compressor.commit(arrived);
  }
  CHECK(sent == 20);
}

TEST_CASE("worker: as_ready, a part of which nothing arrived keeps its place among those that wait") {
  // The queue is [1, 2] after the first step; the share is one layer a step.
  lamina::gradient_compressor<float> compressor(
      model_of({10, 10, 10}), {.byte_budget = 1.0 / 3, .decide = decision_timing::as_ready});
  std::vector<std::size_t> sent;
  for (int step = 1; step <= 4; ++step) {
    for (std::size_t l = 0; l < 3; ++l) compressor.accumulate(l, std::vector<float>(10, 1));
    compressor.encode();
    REQUIRE(compressor.chosen().sent_layers() == 1);
    sent.push_back(*compressor.chosen().sent().begin());
    lamina::delivery arrived(compressor.chosen(), 10);
    if (step == 2) arrived.lose(sent.back(), 0);
    compressor.commit(arrived);
  }
  CHECK(sent == std::vector<std::size_t>{0, 1, 1, 2});
}

TEST_CASE("worker: ahead, a part of which nothing arrived is predicted with its residual") {
  lamina::gradient_compressor<float> compressor(model_of({10, 10, 10}),
                                                {.drop_ratio = 0, .decide = decision_timing::ahead});
  for (std::size_t l = 0; l < 3; ++l)
    compressor.accumulate(l, std::vector<float>(10, 1 + static_cast<float>(l)));
  compressor.encode();
  CHECK(same_bits(compressor.predicted_values(), std::vector<double>{1, 2, 3}));
  lamina::delivery arrived(compressor.chosen(), 5);
  arrived.lose(0, 0);
  arrived.lose(1, 0);
  arrived.lose(1, 1);
  compressor.commit(arrived);
  CHECK(same_bits(compressor.predicted_values(), std::vector<double>{1, 2 + 2, 3}));
}

TEST_CASE("worker: the value of a part that arrived in part is taken anew where the next step skips it") {
  lamina::gradient_compressor<float> compressor(model_of({8, 8, 8}), {.drop_ratio = 0});
  for (std::size_t l = 0; l < 3; ++l) compressor.accumulate(l, std::vector<float>(8, 4));
  compressor.encode();
  lamina::delivery arrived(compressor.chosen(), 2);
  arrived.lose(0, 3);
  for (std::size_t chunk = 0; chunk < 4; ++chunk) arrived.lose(1, chunk);
  compressor.commit(arrived);
  for (std::size_t l = 0; l < 3; ++l) compressor.skip(l);
  CHECK(same_bits(compressor.values(), std::vector<double>{1, 4, 0}));
}

TEMPLATE_TEST_CASE("worker: what was packed is committed by what arrived of it", "", float, double) {
  // The payload is of frames; packed elements go as they are, and their chunks need no multiple of 64.
  for (const payload_type payload : {payload_type::as_is, payload_type::int8, payload_type::int4}) {
    lamina::gradient_compressor<TestType> compressor(model_of({10, 6}),
                                                     {.drop_ratio = 0, .payload = payload});
    compressor.accumulate(0, std::vector<TestType>(10, static_cast<TestType>(0.3)));
    compressor.accumulate(1, std::vector<TestType>(6, static_cast<TestType>(0.7)));
    compressor.select();
    std::vector<TestType> packed(16);
    compressor.pack(packed);
    lamina::delivery arrived(compressor.chosen(), 3);
    arrived.lose(0, 1);
    arrived.lose(0, 3);
    compressor.commit(arrived);
    const auto x = static_cast<TestType>(0.3);
    CHECK(same_bits(compressor.residual()[0], std::vector<TestType>{0, 0, 0, x, x, x, 0, 0, 0, x}));
    CHECK(same_bits(compressor.residual()[1], std::vector<TestType>(6)));
  }
}
