// SPDX-License-Identifier: MIT
#include "lamina/any_compressor.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "catch.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::any_compressor;
using lamina::any_tensor;
using lamina::element_type;
using lamina::value_functor;

namespace {

void backwards(std::size_t pieces, const std::function<void(std::size_t)>& work) {
  for (std::size_t i = pieces; i > 0; --i) work(i - 1);
}

template <class T, class F>
void require_the_same(element_type type, value_functor functor, double momentum, lamina::non_finite check) {
  std::mt19937 random(901);
  const lamina::layout model = model_of({4096 * 40, 3, 0, 700});
  lamina::compressor_options options;
  options.drop_ratio = 0.6;
  options.momentum = momentum;
  options.non_finite = check;
  options.part_elements = 4096;
  options.sender = 3;
  any_compressor any(model, type, options, functor);
  lamina::gradient_compressor<T, F> typed(model, options);
  for (int step = 0; step < 4; ++step) {
    std::vector<std::vector<T>> gradients;
    std::vector<any_tensor> tensors;
    for (const std::size_t size : model.sizes()) gradients.push_back(random_integers<T>(random, size));
    for (const auto& each : gradients) tensors.emplace_back(std::span<const T>(each));
    any.accumulate_all(tensors, 0.5, backwards);
    typed.accumulate_all(gradients, 0.5);
    any.accumulate(1, tensors[1]);
    typed.accumulate(1, gradients[1]);
    const std::vector<lamina::bfloat16> halves(700, {0x3f80});
    std::vector<lamina::float16> others(700, {0x3555});
    if (check == lamina::non_finite::skip) others[5] = {0x7c00};
    for (const double scale : {1.0, 0.7}) {
      any.accumulate(3, std::span(halves), scale);
      typed.accumulate(3, halves, scale);
      any.accumulate(3, std::span(others), scale);
      typed.accumulate(3, others, scale);
    }
    REQUIRE(same_bits(any.values(), typed.values()));
    if (step % 2 == 0) {
      REQUIRE(any.encode().to_bytes() == typed.encode().to_bytes());
    } else {
      any.select(typed.values());
      typed.select(typed.values());
      std::vector<T> packed(typed.chosen().sent_elements());
      auto of_any = packed;
      typed.pack(packed, 4);
      any.pack(std::span<T>(of_any), 4);
      REQUIRE(same_bits(of_any, packed));
      std::vector<any_tensor> out;
      for (auto& each : gradients) out.emplace_back(std::span<T>(each));
      any.scatter(std::span<const T>(packed), out);
      auto expected = gradients;
      lamina::scatter<T>(typed.chosen(), typed.cut(), packed, expected);
      REQUIRE(gradients == expected);
    }
    if (step < 2) {
      any.commit();
      typed.commit();
    } else {
      lamina::delivery arrived(typed.chosen(), 192);
      for (const std::size_t part : typed.chosen().sent()) arrived.lose(part, 0);
      any.commit(arrived);
      typed.commit(arrived);
    }
    REQUIRE(any.threshold() == typed.threshold());
    REQUIRE(any.left_out_elements() == typed.residual().left_out_elements());
    for (std::size_t part = 0; part < any.parts().layers(); ++part) {
      REQUIRE(same_bits(lamina::elements_of<T>(any.residual(part)), typed.residual()[part]));
    }
    REQUIRE(any.save() == typed.save());
  }
  any_compressor resumed(model, type, options, functor);
  resumed.load(typed.save());
  CHECK(resumed.step() == 4);
}

template <class T, class F>
void require_the_same(element_type type, value_functor functor) {
  for (const double momentum : {0.0, 0.5}) {
    for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip})
      require_the_same<T, F>(type, functor, momentum, check);
  }
}

}  // namespace

TEST_CASE("any_compressor: does what the compressor of the same types does, to the last bit") {
  require_the_same<float, lamina::mean_abs>(element_type::float32, value_functor::mean_abs);
  require_the_same<float, lamina::l1_norm>(element_type::float32, value_functor::l1_norm);
  require_the_same<float, lamina::l2_norm>(element_type::float32, value_functor::l2_norm);
  require_the_same<double, lamina::root_mean_square>(element_type::float64, value_functor::root_mean_square);
  require_the_same<double, lamina::max_abs>(element_type::float64, value_functor::max_abs);
  require_the_same<double, lamina::signed_mean>(element_type::float64, value_functor::signed_mean);
}

TEST_CASE("any_compressor: is decided when the compressor of the same types is") {
  for (const auto timing : {lamina::decision_timing::as_ready, lamina::decision_timing::ahead}) {
    std::mt19937 random(902);
    const lamina::layout model = model_of({30, 3, 0, 70});
    lamina::compressor_options options;
    options.drop_ratio = 0.5;
    options.decide = timing;
    any_compressor any(model, element_type::float32, options);
    lamina::gradient_compressor<float> typed(model, options);
    for (int step = 0; step < 6; ++step) {
      any.begin_step();
      any.expect_more_pieces(step % 2 == 0);
      typed.expect_more_pieces(step % 2 == 0);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        const auto gradient = random_integers<float>(random, model.sizes()[l]);
        any.accumulate(l, std::span(gradient));
        typed.accumulate(l, gradient);
        REQUIRE(any.is_decided(l) == typed.is_decided(l));
        if (any.is_decided(l)) REQUIRE(any.is_sent(l) == typed.is_sent(l));
      }
      if (timing == lamina::decision_timing::ahead) {
        REQUIRE(same_bits(any.predicted_values(), typed.predicted_values()));
        any.plan_next(typed.predicted_values());
        typed.plan_next(
            std::vector<double>(typed.predicted_values().begin(), typed.predicted_values().end()));
      }
      REQUIRE(any.encode().to_bytes() == typed.encode().to_bytes());
      any.commit();
      typed.commit();
      REQUIRE(any.save() == typed.save());
    }
  }
}

TEST_CASE("any_compressor: half-width gradients, none, and those that are not finite") {
  any_compressor worker(model_of({2, 1}), element_type::float32);
  const std::vector<lamina::bfloat16> halves = {{0x3f80}, {0x4000}};
  const std::vector<double> doubles = {1, 2};
  worker.accumulate_all(std::vector<any_tensor>{std::span(halves), any_tensor()});
  CHECK(lamina::elements_of<float>(worker.residual(0))[1] == 2);
  CHECK(lamina::elements_of<float>(worker.residual(1))[0] == 0);
  CHECK_THROWS_AS(worker.accumulate(1, any_tensor()), std::invalid_argument);
  CHECK_THROWS_AS(worker.accumulate(0, std::span(doubles)), std::invalid_argument);
  const std::vector<lamina::float16> infinite = {{0x7c00}};
  const std::vector<any_tensor> bad = {std::span(halves), std::span(infinite)};
  CHECK(worker.first_non_finite(bad) == std::size_t{1});
  CHECK_THROWS_AS(worker.accumulate_all(bad), lamina::non_finite_gradient);
  std::vector<char> is_zero(2);
  worker.find_zero(std::vector<any_tensor>{any_tensor(), std::span(infinite)}, is_zero);
  CHECK(is_zero == std::vector<char>{1, 0});
}

TEST_CASE("any_compressor: what cannot be is refused by name") {
  const lamina::layout model = model_of({1});
  CHECK(contains(message_of<std::invalid_argument>([&] { any_compressor(model, element_type::float16); }),
                 "float32 or float64"));
  const auto unknown = static_cast<value_functor>(9);
  CHECK(contains(
      message_of<std::invalid_argument>([&] { any_compressor(model, element_type::float32, {}, unknown); }),
      "functor 9"));
  float number = 0;
  CHECK_THROWS_AS(any_tensor(static_cast<float*>(nullptr), 1, element_type::float32), std::invalid_argument);
  CHECK_THROWS_AS(any_tensor(&number, 1, static_cast<element_type>(7)), std::invalid_argument);
  CHECK_THROWS_AS(any_tensor(reinterpret_cast<char*>(&number) + 1, 0, element_type::float32),
                  std::invalid_argument);
  CHECK_NOTHROW(any_tensor::empty(element_type::float32));

  any_compressor worker(model, element_type::float32);
  worker.accumulate(0, any_tensor(&number, 1, element_type::float32));
  worker.select();
  const float constant = 0;
  CHECK(contains(message_of<std::invalid_argument>(
                     [&] { worker.pack(any_tensor(&constant, 1, element_type::float32)); }),
                 "const"));
  double wide = 0;
  CHECK_THROWS_AS(worker.pack(any_tensor(&wide, 1, element_type::float64)), std::invalid_argument);
}

TEST_CASE("any_compressor: packs into tensors of half the width where the payload is of their type") {
  const lamina::layout model = model_of({300, 5});
  lamina::compressor_options options;
  options.drop_ratio = 0;
  options.payload = lamina::payload_type::bfloat16;
  any_compressor any(model, element_type::float32, options);
  lamina::gradient_compressor<float> typed(model, options);
  std::mt19937 random(911);
  const std::vector<std::vector<float>> gradients = {random_fractions<float>(random, 300),
                                                     random_fractions<float>(random, 5)};
  any.accumulate_all(std::vector<any_tensor>{gradients[0], gradients[1]});
  typed.accumulate_all(gradients);
  any.select();
  typed.select();
  std::vector<lamina::bfloat16> packed(305);
  std::vector<lamina::bfloat16> expected(305);
  std::vector<lamina::float16> other(305);
  CHECK_THROWS_AS(any.pack(std::span(packed), 2), std::invalid_argument);
  CHECK_THROWS_AS(any.pack(std::span(other)), std::invalid_argument);
  CHECK_THROWS_AS(any.pack(std::span(packed).first(304)), std::invalid_argument);
  any.pack(std::span(packed));
  typed.pack(std::span(expected));
  CHECK(packed == expected);
  any.commit();
  typed.commit();
  CHECK(any.save() == typed.save());
}

TEST_CASE("any_tensor: from spans of any extent, contiguous ranges that last, and nothing") {
  std::vector<float> numbers = {1, 2, 3};
  const std::vector<double> constant = {1, 2};
  std::array<lamina::float16, 2> halves = {};
  const any_tensor of_range = numbers;
  CHECK(of_range.data() == numbers.data());
  CHECK(of_range.elements() == 3);
  CHECK(of_range.type() == element_type::float32);
  CHECK(of_range.is_writable());
  CHECK_FALSE(any_tensor(constant).is_writable());
  CHECK(any_tensor(constant).type() == element_type::float64);
  CHECK(any_tensor(halves).type() == element_type::float16);
  CHECK(any_tensor(std::span<float, 3>(numbers)).elements() == 3);
  CHECK(any_tensor(std::span<const float, 3>(numbers)).elements() == 3);
  CHECK(any_tensor(nullptr, 0, element_type::float64).has_value());
  CHECK_THROWS_AS(any_tensor(nullptr, 1, element_type::float64), std::invalid_argument);
  static_assert(!std::is_constructible_v<any_tensor, std::vector<float>>);  // gone before it is read
  static_assert(!std::is_constructible_v<any_tensor, std::vector<int>&>);

  // What is missing is not what is const.
  any_compressor worker(model_of({3}), element_type::float32, {.drop_ratio = 0});
  worker.accumulate(0, of_range);
  worker.select();
  const auto message = message_of<std::invalid_argument>([&] { worker.pack(any_tensor()); });
  CHECK(contains(message, "there is no tensor"));
  std::vector<any_tensor> missing(1);
  worker.pack(numbers);
  CHECK(contains(message_of<std::invalid_argument>([&] { worker.scatter(numbers, missing); }),
                 "there is no tensor"));
}
