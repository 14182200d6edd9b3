// SPDX-License-Identifier: MIT
// What of a residual depends on the kernels: the tests of finite checks, of half-width gradients and of momentum, which are
// also built for each instruction set.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "accumulate.hpp"
#include "catch.hpp"
#include "lamina/residual.hpp"
#include "residual_cases.hpp"
#include "support.hpp"

using namespace lamina_test;

namespace {

template <class T>
std::vector<T> widened(const auto& halves) {
  std::vector<T> values;
  for (const auto half : halves) values.push_back(static_cast<T>(lamina::to_float(half)));
  return values;
}

// u <- m u + g, a <- a + u, each rounding by itself; false, and nothing changed, if an element would not be finite.
template <class T>
bool literal_add(std::vector<T>& a, std::vector<T>& u, const std::vector<T>& gradient, double momentum) {
  std::vector<T> new_a = a;
  std::vector<T> new_u = u;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const volatile T product = static_cast<T>(momentum) * u[i];
    const volatile T velocity = product + gradient[i];
    const volatile T sum = a[i] + velocity;
    new_u[i] = velocity;
    new_a[i] = sum;
  }
  if (!std::ranges::all_of(new_a, [](T each) { return std::isfinite(each); })) return false;
  a = new_a;
  u = new_u;
  return true;
}

// The same element by element; the number of those left out.
template <class T>
std::size_t literal_add_each(std::vector<T>& a, std::vector<T>& u, const std::vector<T>& gradient,
                             double momentum) {
  std::size_t left_out = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::vector<T> one_a = {a[i]};
    std::vector<T> one_u = {u[i]};
    left_out += !literal_add(one_a, one_u, {gradient[i]}, momentum);
    a[i] = one_a[0];
    u[i] = one_u[0];
  }
  return left_out;
}

}  // namespace

TEMPLATE_TEST_CASE("residual: NaN and infinity are refused wherever they stand, and nothing changes", "",
                   float, double) {
  const std::size_t elements = 2 * 4096 + 70;
  const lamina::layout model({{"first", {elements}}, {"second", {64, 2}}});
  std::mt19937 random(39);
  // Integers, which can be subtracted again to the last bit.
  lamina::residual_accumulator<TestType> residual(model);
  accumulate(residual, 0, random_integers<TestType>(random, elements));
  accumulate(residual, 1, random_integers<TestType>(random, 128));
  const auto before = copy_of(residual[0]);
  const auto neighbour = copy_of(residual[1]);
  auto gradient = random_integers<TestType>(random, elements);
  for (const TestType bad : {nan_value<TestType>, -nan_value<TestType>, infinity<TestType>,
                             -infinity<TestType>, std::numeric_limits<TestType>::signaling_NaN()}) {
    for (const std::size_t place :
         {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{4095},
          std::size_t{4096}, std::size_t{4097}, std::size_t{8191}, std::size_t{8192}, elements - 7,
          elements / 2, elements - 1}) {
      CAPTURE(place);
      const TestType good = gradient[place];
      gradient[place] = bad;
      REQUIRE_THROWS_AS(accumulate(residual, 0, gradient), lamina::non_finite_gradient);
      REQUIRE(same_bits(residual[0], before));
      REQUIRE(same_bits(residual[1], neighbour));
      gradient[place] = good;
    }
  }
  CHECK_NOTHROW(accumulate(residual, 0, gradient));
  std::vector<TestType> small(128, nan_value<TestType>);
  const auto second = [&] { accumulate(residual, 1, small); };
  CHECK_THROWS_AS(second(), lamina::non_finite_gradient);
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
      accumulate(residual, 0, gradient);
      const auto before = copy_of(residual[0]);
      const auto add = [&] { accumulate(residual, 0, gradient); };
      REQUIRE_THROWS_AS(add(), lamina::non_finite_gradient);
      REQUIRE(same_bits(residual[0], before));
      gradient[place] = -gradient[place];  // back to where there is room
      REQUIRE_NOTHROW(accumulate(residual, 0, gradient));
      REQUIRE(residual[0][place] == 0);
    }
  }
}

TEMPLATE_TEST_CASE("residual: large values that fit are accepted", "", float, double) {
  lamina::residual_accumulator<TestType> residual(model_of({2}));
  accumulate(residual, 0, std::vector<TestType>{largest<TestType>, -largest<TestType>});
  CHECK(residual[0][0] == largest<TestType>);
  accumulate(residual, 0, std::vector<TestType>{-largest<TestType>, largest<TestType>});
  CHECK(residual[0][0] == 0);
  CHECK(residual[0][1] == 0);
  // Large elements that never meet: the bound over the layer is too coarse, the sums are not.
  accumulate(residual, 0, std::vector<TestType>{largest<TestType>, 0});
  accumulate(residual, 0, std::vector<TestType>{0, largest<TestType>});
  CHECK(residual[0][0] == largest<TestType>);
  CHECK(residual[0][1] == largest<TestType>);
  // After clear there is room again.
  residual.clear(0);
  accumulate(residual, 0, std::vector<TestType>{largest<TestType>, largest<TestType>});
  CHECK(residual[0][1] == largest<TestType>);
}

TEMPLATE_TEST_CASE("residual: half-width gradients add as the same ones widened do, bit for bit", "",
                   (std::pair<float, lamina::float16>), (std::pair<double, lamina::float16>),
                   (std::pair<float, lamina::bfloat16>), (std::pair<double, lamina::bfloat16>)) {
  using T = typename TestType::first_type;
  using half = typename TestType::second_type;
  std::mt19937 random(502);
  std::vector<std::size_t> lengths;
  for (std::size_t length = 0; length <= 300; ++length) lengths.push_back(length);
  lengths.insert(lengths.end(), {4032, 4094, 4095, 4096, 4097, 4098, 4160, 8191, 8192, 8193});
  for (const std::size_t length : lengths) {
    for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
      for (const double momentum : {0.0, 0.9}) {
        CAPTURE(length, momentum);
        lamina::residual_accumulator<T> from_halves(model_of({1, length, 1}), with_check(check, momentum));
        lamina::residual_accumulator<T> from_wide(model_of({1, length, 1}), with_check(check, momentum));
        for (int step = 0; step < 4; ++step) {
          std::vector<half> gradient(length);
          for (half& each : gradient) {
            // Any bits below 2^-1 and so: denormals and zeros of both signs among them.
            each = {static_cast<std::uint16_t>(random())};
            each.bits &= static_cast<std::uint16_t>(~0x4000U);
            if (random() % 8 == 0) each.bits &= 0x800f;
          }
          const auto wide = widened<T>(gradient);
          for (auto* each : {&from_halves, &from_wide}) each->begin_step();
          if (step == 3) {
            REQUIRE(same_bits(accumulate(from_halves, 1, gradient, lamina::l2_norm{}),
                              accumulate(from_wide, 1, wide, lamina::l2_norm{})));
          } else {
            REQUIRE(same_bits(accumulate(from_halves, 1, gradient), accumulate(from_wide, 1, wide)));
          }
          REQUIRE(same_bits(from_halves.elements(), from_wide.elements()));
          REQUIRE(same_bits(from_halves.velocity(), from_wide.velocity()));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("residual: NaN, infinity and overflow by half-width gradients are refused", "", float,
                   double) {
  lamina::residual_accumulator<TestType> residual(model_of({70}));
  const std::vector<TestType> start(70, largest<TestType>);
  accumulate(residual, 0, start);
  for (const auto bits : std::initializer_list<std::uint16_t>{0x7c00, 0xfc00, 0x7c01, 0x7e00, 0xffff}) {
    for (const std::size_t place : {0, 64, 69}) {
      std::vector<lamina::float16> gradient(70);
      gradient[place].bits = bits;
      REQUIRE_THROWS_AS(accumulate(residual, 0, gradient), lamina::non_finite_gradient);
      REQUIRE(same_bits(residual[0], start));
    }
  }
  for (const auto bits : std::initializer_list<std::uint16_t>{0x7f80, 0xff80, 0x7f81, 0x7fc0, 0xffff}) {
    std::vector<lamina::bfloat16> gradient(70);
    gradient[69].bits = bits;
    REQUIRE_THROWS_AS(accumulate(residual, 0, gradient), lamina::non_finite_gradient);
    REQUIRE(same_bits(residual[0], start));
  }
  const std::vector<lamina::bfloat16> large(70, lamina::bfloat16{0x7f7f});
  if (sizeof(TestType) == 4) {
    REQUIRE_THROWS_AS(accumulate(residual, 0, large), lamina::non_finite_gradient);
  } else {
    REQUIRE_NOTHROW(accumulate(residual, 0, large));
  }
  REQUIRE(same_bits(residual[0], start));
}

TEMPLATE_TEST_CASE("residual: skip leaves out the bad number alone, in the residual and the velocity", "",
                   float, double) {
  const std::size_t elements = 2 * 4096 + 70;
  const lamina::layout model = model_of({9, elements, 9});
  std::mt19937 random(503);
  for (const double momentum : {0.0, 0.9}) {
    for (const TestType bad : {nan_value<TestType>, -nan_value<TestType>, infinity<TestType>,
                               -infinity<TestType>, std::numeric_limits<TestType>::signaling_NaN()}) {
      for (const std::size_t place :
           {std::size_t{0}, std::size_t{2000}, std::size_t{4095}, std::size_t{4096}, std::size_t{6000},
            std::size_t{8191}, std::size_t{8192}, elements - 35, elements - 1}) {
        CAPTURE(momentum, place);
        lamina::residual_accumulator<TestType> residual(model,
                                                        with_check(lamina::non_finite::skip, momentum));
        std::vector<TestType> a(elements);
        std::vector<TestType> u(elements);
        std::size_t left_out = 0;
        // Left out of a clear residual, of a filled one, and of one after it was cleared.
        for (int step = 0; step < 6; ++step) {
          auto gradient = random_fractions<TestType>(random, elements);
          const bool is_bad = step % 3 != 1;
          auto without = gradient;
          const auto before_a = a;
          const auto before_u = u;
          REQUIRE(literal_add(a, u, without, momentum));
          if (is_bad) {
            gradient[place] = bad;
            left_out += 1;
            a[place] = before_a[place];
            u[place] = before_u[place];
          }
          residual.begin_step();
          const double value = accumulate(residual, 1, gradient);
          REQUIRE(same_bits(residual[1], a));
          REQUIRE(same_bits(value, literal_mean_abs<TestType>(a)));
          REQUIRE(residual.left_out_elements() == left_out);
          if (momentum > 0) REQUIRE(same_bits(residual.velocity().subspan(9, elements), u));
          REQUIRE(same_bits(residual[0], std::vector<TestType>(9)));
          REQUIRE(same_bits(residual[2], std::vector<TestType>(9)));
          if (step == 2) {
            residual.clear(1);
            a.assign(elements, TestType(0));
            u.assign(elements, TestType(0));
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("residual: skip leaves out what would overflow", "", float, double) {
  const std::size_t elements = 3 * 4096;
  lamina::residual_accumulator<TestType> residual(model_of({elements}), with_check(lamina::non_finite::skip));
  std::vector<TestType> gradient(elements, TestType(1));
  gradient[4096 + 17] = largest<TestType> * TestType(0.75);
  gradient[2 * 4096] = -largest<TestType> * TestType(0.75);
  accumulate(residual, 0, gradient);
  CHECK(residual.left_out_elements() == 0);
  auto expected = gradient;
  gradient[2 * 4096] = largest<TestType> * TestType(0.75);  // back to zero, where there is room
  const double value = accumulate(residual, 0, gradient);
  CHECK(residual.left_out_elements() == 1);
  for (std::size_t i = 0; i < elements; ++i) {
    if (i != 4096 + 17) expected[i] += gradient[i];
  }
  CHECK(same_bits(residual[0], expected));
  CHECK(same_bits(value, lamina::mean_abs{}(residual[0])));
  // Small gradients on a residual close to the largest number: what fits is added, what does not is left out.
  lamina::residual_accumulator<TestType> full(model_of({2 * 4096}), with_check(lamina::non_finite::skip));
  std::vector<TestType> start(2 * 4096, TestType(0));
  start[0] = largest<TestType>;
  accumulate(full, 0, start);
  accumulate(full, 0, std::vector<TestType>(2 * 4096, TestType(1)));  // rounds to the largest number
  CHECK(full.left_out_elements() == 0);
  std::vector<TestType> half_digit(2 * 4096, TestType(1));
  half_digit[0] = largest<TestType> * std::numeric_limits<TestType>::epsilon();
  accumulate(full, 0, half_digit);
  CHECK(full.left_out_elements() == 1);
  CHECK(full[0][0] == largest<TestType>);
  CHECK(full[0][1] == 2);
  CHECK(full[0][4096] == 2);
}

TEMPLATE_TEST_CASE("residual: momentum is u = m u + g, a += u, each rounded by itself", "", float, double) {
  std::mt19937 random(504);
  for (const double momentum : {0.1, 0.5, 0.9, 0.999}) {
    for (const std::size_t length : {1, 63, 64, 65, 300, 4095, 4096, 4097, 8192 + 70}) {
      for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
        CAPTURE(momentum, length);
        lamina::residual_accumulator<TestType> residual(model_of({3, length, 2}),
                                                        with_check(check, momentum));
        REQUIRE(residual.velocity().size() == length + 5);
        std::vector<TestType> a(length);
        std::vector<TestType> u(length);
        const std::vector<TestType> ones(3, TestType(1));
        accumulate(residual, 0, ones);
        for (int step = 0; step < 6; ++step) {
          const auto gradient = random_fractions<TestType>(random, length);
          residual.begin_step();
          const double value = accumulate(residual, 1, gradient);
          REQUIRE(literal_add(a, u, gradient, momentum));
          REQUIRE(same_bits(residual[1], a));
          REQUIRE(same_bits(residual.velocity().subspan(3, length), u));
          REQUIRE(same_bits(value, literal_mean_abs<TestType>(a)));
          if (step == 3) {
            residual.clear(1);
            a.assign(length, TestType(0));
            u.assign(length, TestType(0));
            REQUIRE(same_bits(residual.velocity().subspan(3, length), u));
          }
        }
        REQUIRE(same_bits(residual[0], ones));  // neighbours keep theirs
        REQUIRE(same_bits(residual.velocity().first(3), ones));
      }
    }
  }
}

TEMPLATE_TEST_CASE("residual: subtract takes out what a payload says, and the velocity whole", "", float,
                   double) {
  std::mt19937 random(505);
  for (const auto type : {lamina::payload_type::float16, lamina::payload_type::bfloat16,
                          lamina::payload_type::int8, lamina::payload_type::int4}) {
    const std::size_t length = 2 * 4096 + 70;
    lamina::residual_accumulator<TestType> residual(model_of({3, length, 2}), {.momentum = 0.5});
    accumulate(residual, 0, std::vector<TestType>(3, TestType(1)));
    accumulate(residual, 1, random_fractions<TestType>(random, length));
    accumulate(residual, 2, std::vector<TestType>(2, TestType(1)));
    auto expected = copy_of(residual[1]);
    std::vector<std::byte> wire(lamina::payload_bytes<TestType>(type, length));
    lamina::detail::encode_payload(type, residual[1], wire.data());
    std::vector<TestType> sent(length);
    lamina::detail::decode_payload<TestType>(type, wire.data(), length, 0, sent);
    residual.subtract(1, type);
    for (std::size_t i = 0; i < length; ++i) expected[i] -= sent[i];
    CHECK(same_bits(residual[1], expected));
    CHECK(same_bits(residual.velocity().subspan(3, length), std::vector<TestType>(length)));
    CHECK(same_bits(residual.velocity().first(3), std::vector<TestType>(3, TestType(1))));
    CHECK(same_bits(residual[2], std::vector<TestType>(2, TestType(1))));
    // What stays counts when the next gradient comes.
    const auto gradient = random_fractions<TestType>(random, length);
    accumulate(residual, 1, gradient);
    for (std::size_t i = 0; i < length; ++i) expected[i] += gradient[i];
    CHECK(same_bits(residual[1], expected));
  }
}

TEMPLATE_TEST_CASE("residual: a clear residual takes a gradient as one of zeros does, -0 included", "", float,
                   double) {
  std::mt19937 random(506);
  std::vector<std::size_t> lengths;
  for (std::size_t length = 0; length <= 300; ++length) lengths.push_back(length);
  lengths.insert(lengths.end(), {4095, 4096, 4097, 8192 + 70});
  for (const std::size_t length : lengths) {
    auto gradient = random_fractions<TestType>(random, length);
    for (TestType& each : gradient) {
      if (random() % 3 == 0) each = random() % 2 == 0 ? -TestType(0) : TestType(0);
    }
    const lamina::layout model = model_of({1, length, 1});
    lamina::residual_accumulator<TestType> fresh(model);
    lamina::residual_accumulator<TestType> cleared(model);
    lamina::residual_accumulator<TestType> zeros(model);
    accumulate(cleared, 1, random_fractions<TestType>(random, length));
    cleared.clear(1);
    zeros.restore(std::vector<TestType>(length + 2), {});  // known to be anything, so it is read
    auto expected = gradient;
    for (TestType& each : expected) each += TestType(0);
    const double value = accumulate(zeros, 1, gradient);
    REQUIRE(same_bits(zeros[1], expected));
    REQUIRE(same_bits(accumulate(fresh, 1, gradient), value));
    REQUIRE(same_bits(fresh[1], expected));
    REQUIRE(same_bits(accumulate(cleared, 1, gradient), value));
    REQUIRE(same_bits(cleared[1], expected));
    REQUIRE(same_bits(value, literal_mean_abs<TestType>(expected)));
    // And once more, now that none of them is clear.
    accumulate(zeros, 1, gradient);
    accumulate(fresh, 1, gradient);
    REQUIRE(same_bits(fresh[1], zeros[1]));
  }
}

TEMPLATE_TEST_CASE("residual: refuses what would overflow and nothing else, small and huge by turns", "",
                   float, double) {
  const double momentum = GENERATE(0.0, 0.5, 0.9, 0.99);
  const TestType most_small =
      std::nextafter(sizeof(TestType) == 4 ? TestType(0x1p100F) : TestType(0x1p990), TestType(0));
  std::mt19937 random(507);
  int refused = 0;
  int accepted = 0;
  for (int run = 0; run < 300; ++run) {
    CAPTURE(momentum, run);
    lamina::residual_accumulator<TestType> whole(model_of({3}), {.momentum = momentum});
    lamina::residual_accumulator<TestType> each(model_of({3}),
                                                with_check(lamina::non_finite::skip, momentum));
    std::vector<TestType> a(3);
    std::vector<TestType> u(3);
    std::vector<TestType> each_a(3);
    std::vector<TestType> each_u(3);
    std::size_t left_out = 0;
    for (int step = 0; step < 40; ++step) {
      const bool huge = random() % 3 == 0;
      std::vector<TestType> gradient(3);
      for (TestType& element : gradient) {
        const TestType share = static_cast<TestType>(below(random, 9)) / 8;
        element = (huge ? largest<TestType> : most_small) * (random() % 2 == 0 ? share : -share);
      }
      whole.begin_step();
      each.begin_step();
      if (literal_add(a, u, gradient, momentum)) {
        ++accepted;
        REQUIRE_NOTHROW(accumulate(whole, 0, gradient));
      } else {
        ++refused;
        REQUIRE_THROWS_AS(accumulate(whole, 0, gradient), lamina::non_finite_gradient);
        REQUIRE(worst_distance<TestType>(whole[0], a) <= 1.001);
        a = copy_of(whole[0]);
        if (momentum > 0) u = copy_of(whole.velocity());
      }
      accumulate(each, 0, gradient);
      left_out += literal_add_each(each_a, each_u, gradient, momentum);
      REQUIRE(each.left_out_elements() == left_out);
      REQUIRE(same_bits(whole[0], a));
      REQUIRE(same_bits(each[0], each_a));
      if (momentum > 0) REQUIRE(same_bits(whole.velocity(), u));
      if (momentum > 0) REQUIRE(same_bits(each.velocity(), each_u));
      if (random() % 16 == 0) {
        whole.clear(0);
        each.clear(0);
        for (auto* values : {&a, &u, &each_a, &each_u}) values->assign(3, TestType(0));
      }
    }
  }
  CHECK(refused > 100);
  CHECK(accepted > 100);
}

// A velocity near the largest number while the residual itself is small.
