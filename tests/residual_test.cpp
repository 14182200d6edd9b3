// SPDX-License-Identifier: MIT
#include "lamina/residual.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "catch.hpp"
#include "support.hpp"

using namespace lamina_test;

namespace {

template <class T>
constexpr T largest = std::numeric_limits<T>::max();
template <class T>
constexpr T infinity = std::numeric_limits<T>::infinity();
template <class T>
constexpr T nan_value = std::numeric_limits<T>::quiet_NaN();

template <class T>
std::vector<T> copy_of(std::span<const T> values) {
  return {values.begin(), values.end()};
}

}  // namespace

TEMPLATE_TEST_CASE("residual: zeros at first, n_l of them, from the start of a cache line", "", float,
                   double) {
  const lamina::layout model = model_of({3, 0, 5000});
  const lamina::residual_accumulator<TestType> residual(model);
  for (std::size_t l = 0; l < 3; ++l) {
    CHECK(same_bits(residual[l], std::vector<TestType>(model.sizes()[l], TestType(0))));
  }
  CHECK(reinterpret_cast<std::uintptr_t>(residual[0].data()) % 64 == 0);
  CHECK(residual[2].data() == residual[0].data() + 3);
  CHECK(residual.model().fingerprint() == model.fingerprint());
}

TEMPLATE_TEST_CASE("residual: a += g, and the literal value of the sum, in every layer", "", float, double) {
  for (std::uint32_t seed = 31; seed < 36; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    lamina::residual_accumulator<TestType> residual(model);
    std::vector<std::vector<TestType>> expected;
    for (const std::size_t size : model.sizes()) expected.emplace_back(size);
    for (int step = 0; step < 10; ++step) {
      for (std::size_t l = 0; l < model.layers(); ++l) {
        const auto gradient = random_fractions<TestType>(random, model.sizes()[l]);
        const double value = residual.accumulate(l, gradient);
        for (std::size_t i = 0; i < gradient.size(); ++i) expected[l][i] += gradient[i];
        REQUIRE(same_bits(value, literal_mean_abs<TestType>(expected[l])));
        for (std::size_t k = 0; k < model.layers(); ++k) REQUIRE(same_bits(residual[k], expected[k]));
      }
    }
  }
}

TEMPLATE_TEST_CASE("residual: the fused value is the functor's own, for every length and misalignment", "",
                   float, double) {
  std::mt19937 random(37);
  const auto memory = random_fractions<TestType>(random, 8300);
  std::vector<std::size_t> lengths;
  for (std::size_t length = 0; length <= 200; ++length) lengths.push_back(length);
  lengths.insert(lengths.end(), {4095, 4096, 4097, 8191, 8192, 8193});
  for (const std::size_t length : lengths) {
    for (std::size_t misaligned = 0; misaligned < 16; ++misaligned) {
      lamina::residual_accumulator<TestType> residual(model_of({misaligned, length, 7}));
      const auto gradient = std::span<const TestType>(memory).subspan(16 - misaligned, length);
      residual.accumulate(1, std::span<const TestType>(memory).first(length));
      const auto require_fused = [&](const auto& functor) {
        const double value = residual.accumulate(1, gradient, functor);
        REQUIRE(same_bits(value, functor(residual[1])));
      };
      require_fused(lamina::mean_abs{});
      require_fused(lamina::l2_norm{});
      require_fused(lamina::max_abs{});
      require_fused(lamina::signed_mean{});
      REQUIRE(same_bits(residual[2], std::vector<TestType>(7)));  // nothing written beyond the layer
      REQUIRE(same_bits(residual[0], std::vector<TestType>(misaligned)));
    }
  }
}

TEMPLATE_TEST_CASE("residual: integer gradients add up exactly", "", float, double) {
  std::mt19937 random(38);
  lamina::residual_accumulator<TestType> residual(model_of({100}));
  std::vector<long> sums(100);
  for (int step = 0; step < 1000; ++step) {
    const auto gradient = random_integers<TestType>(random, 100, 1000);
    for (std::size_t i = 0; i < 100; ++i) sums[i] += static_cast<long>(gradient[i]);
    residual.accumulate(0, gradient);
  }
  for (std::size_t i = 0; i < 100; ++i) REQUIRE(residual[0][i] == static_cast<TestType>(sums[i]));
}

TEMPLATE_TEST_CASE("residual: clear zeroes one layer and leaves its neighbours", "", float, double) {
  lamina::residual_accumulator<TestType> residual(model_of({2, 3, 2}));
  residual.accumulate(0, std::vector<TestType>{1, 2});
  residual.accumulate(1, std::vector<TestType>{3, 4, 5});
  residual.accumulate(2, std::vector<TestType>{6, 7});
  residual.clear(1);
  CHECK(same_bits(residual[0], std::vector<TestType>{1, 2}));
  CHECK(same_bits(residual[1], std::vector<TestType>{0, 0, 0}));
  CHECK(same_bits(residual[2], std::vector<TestType>{6, 7}));
  CHECK(residual.accumulate(1, std::vector<TestType>{1, 1, 1}) == 1);
}

TEMPLATE_TEST_CASE("residual: an empty layer has the value 0", "", float, double) {
  lamina::residual_accumulator<TestType> residual(model_of({0, 1}));
  CHECK(same_bits(residual.accumulate(0, std::vector<TestType>{}), 0.0));
  CHECK(same_bits(residual.accumulate(0, std::vector<TestType>{}, lamina::l2_norm{}), 0.0));
  CHECK(residual[0].empty());
}

TEMPLATE_TEST_CASE("residual: NaN and infinity are refused wherever they stand, and nothing changes", "",
                   float, double) {
  const std::size_t elements = 2 * 4096 + 70;
  const lamina::layout model({{"first", {elements}}, {"second", {64, 2}}});
  std::mt19937 random(39);
  lamina::residual_accumulator<TestType> residual(model);
  residual.accumulate(0, random_fractions<TestType>(random, elements));
  residual.accumulate(1, random_fractions<TestType>(random, 128));
  const auto before = copy_of(residual[0]);
  const auto neighbour = copy_of(residual[1]);
  auto gradient = random_fractions<TestType>(random, elements);
  for (const TestType bad : {nan_value<TestType>, -nan_value<TestType>, infinity<TestType>,
                             -infinity<TestType>, std::numeric_limits<TestType>::signaling_NaN()}) {
    for (const std::size_t place :
         {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{4095},
          std::size_t{4096}, std::size_t{4097}, std::size_t{8191}, std::size_t{8192}, elements - 7,
          elements / 2, elements - 1}) {
      CAPTURE(place);
      const TestType good = gradient[place];
      gradient[place] = bad;
      try {
        residual.accumulate(0, gradient);
        FAIL("accepted");
      } catch (const lamina::non_finite_gradient& error) {
        REQUIRE(error.layer() == 0);
        REQUIRE(contains(error.what(), "'first'"));
        REQUIRE(contains(error.what(), "NaN or infinity"));
      }
      REQUIRE(same_bits(residual[0], before));
      REQUIRE(same_bits(residual[1], neighbour));
      gradient[place] = good;
    }
  }
  CHECK_NOTHROW(residual.accumulate(0, gradient));
  std::vector<TestType> small(128, nan_value<TestType>);
  const auto second = [&] { residual.accumulate(1, small); };
  CHECK(contains(message_of<std::domain_error>(second), "layer 1 'second'"));
  CHECK(same_bits(residual[1], neighbour));
}

TEMPLATE_TEST_CASE("residual: a sum that would overflow is refused wherever it stands, and nothing changes",
                   "", float, double) {
  const std::size_t elements = 4096 + 70;
  const lamina::layout model({{"big", {elements}}});
  for (const TestType sign : {TestType(1), TestType(-1)}) {
    for (const std::size_t place :
         {std::size_t{0}, std::size_t{64}, std::size_t{4095}, std::size_t{4096}, elements - 1}) {
      lamina::residual_accumulator<TestType> residual(model);
      std::vector<TestType> gradient(elements, TestType(1));
      gradient[place] = sign * largest<TestType> * TestType(0.75);
      residual.accumulate(0, gradient);
      const auto before = copy_of(residual[0]);
      const auto add = [&] { residual.accumulate(0, gradient); };
      const std::string message = message_of<lamina::non_finite_gradient>(add);
      REQUIRE(contains(message, "'big'"));
      REQUIRE(contains(message, "overflow"));
      REQUIRE(same_bits(residual[0], before));
      gradient[place] = -gradient[place];  // back to where there is room
      REQUIRE_NOTHROW(residual.accumulate(0, gradient));
      REQUIRE(residual[0][place] == 0);
    }
  }
}

TEMPLATE_TEST_CASE("residual: overflow by many harmless steps is noticed at the step that does it", "", float,
                   double) {
  lamina::residual_accumulator<TestType> residual(model_of({5}));
  const std::vector<TestType> tenth(5, largest<TestType> / 16);
  int accepted = 0;
  try {
    for (; accepted < 100; ++accepted) residual.accumulate(0, tenth);
  } catch (const lamina::non_finite_gradient&) {
  }
  // 15/16 is left room for, 16/16 rounds to the largest number or beyond it.
  CHECK(accepted >= 15);
  CHECK(accepted <= 16);
  for (const TestType each : residual[0]) CHECK(std::isfinite(each));
}

TEMPLATE_TEST_CASE("residual: large values that fit are accepted", "", float, double) {
  lamina::residual_accumulator<TestType> residual(model_of({2}));
  residual.accumulate(0, std::vector<TestType>{largest<TestType>, -largest<TestType>});
  CHECK(residual[0][0] == largest<TestType>);
  residual.accumulate(0, std::vector<TestType>{-largest<TestType>, largest<TestType>});
  CHECK(residual[0][0] == 0);
  CHECK(residual[0][1] == 0);
  // Large elements that never meet: the bound over the layer is too coarse, the sums are not.
  residual.accumulate(0, std::vector<TestType>{largest<TestType>, 0});
  residual.accumulate(0, std::vector<TestType>{0, largest<TestType>});
  CHECK(residual[0][0] == largest<TestType>);
  CHECK(residual[0][1] == largest<TestType>);
  // After clear there is room again.
  residual.clear(0);
  residual.accumulate(0, std::vector<TestType>{largest<TestType>, largest<TestType>});
  CHECK(residual[0][1] == largest<TestType>);
}

TEMPLATE_TEST_CASE("residual: clearing one layer does not lose track of another's magnitude", "", float,
                   double) {
  lamina::residual_accumulator<TestType> residual(model_of({1, 1, 1}));
  // Less than half of the largest, so that it is the bound kept for the layer that gives the alarm.
  const std::vector<TestType> much = {largest<TestType> * TestType(0.45)};
  for (std::size_t l = 0; l < 3; ++l) {
    residual.accumulate(l, much);
    residual.accumulate(l, much);
  }
  residual.clear(1);
  CHECK_THROWS_AS(residual.accumulate(0, much), lamina::non_finite_gradient);
  CHECK_THROWS_AS(residual.accumulate(2, much), lamina::non_finite_gradient);
  CHECK_NOTHROW(residual.accumulate(1, much));
  CHECK(std::isfinite(residual[0][0]));
}

TEMPLATE_TEST_CASE("residual: a refused gradient leaves no trace in the magnitude bound", "", float, double) {
  lamina::residual_accumulator<TestType> residual(model_of({1}));
  residual.accumulate(0, std::vector<TestType>{1});
  CHECK_THROWS_AS(residual.accumulate(0, std::vector<TestType>{nan_value<TestType>}),
                  lamina::non_finite_gradient);
  residual.accumulate(0, std::vector<TestType>{largest<TestType> / 4});
  CHECK(residual[0][0] == TestType(1) + largest<TestType> / 4);
}

TEMPLATE_TEST_CASE("residual: a wrong layer or size is refused with both sizes, and nothing changes", "",
                   float, double) {
  const lamina::layout model({{"weight", {2, 3}}, {"bias", {2}}});
  lamina::residual_accumulator<TestType> residual(model);
  residual.accumulate(0, std::vector<TestType>(6, TestType(1)));
  const auto before = copy_of(residual[0]);
  const auto wrong_size = [&] { residual.accumulate(0, std::vector<TestType>(5, TestType(1))); };
  const std::string message = message_of<std::invalid_argument>(wrong_size);
  CHECK(contains(message, "'weight'"));
  CHECK(contains(message, "[2, 3]"));
  CHECK(contains(message, "6 elements"));
  CHECK(contains(message, "5 elements"));
  CHECK_THROWS_AS(residual.accumulate(2, std::vector<TestType>(2)), std::out_of_range);
  CHECK_THROWS_AS(residual[2], std::out_of_range);
  CHECK_THROWS_AS(residual.clear(2), std::out_of_range);
  CHECK(same_bits(residual[0], before));
}

TEST_CASE("residual: an index far out of range is refused before anything is read") {
  lamina::residual_accumulator<float> residual(model_of({1, 1}));
  CHECK_THROWS_AS(residual[std::size_t{1} << 40], std::out_of_range);
  CHECK_THROWS_AS(residual.clear(std::size_t{1} << 40), std::out_of_range);
}
