// SPDX-License-Identifier: MIT
#include "lamina/residual.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <thread>

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

namespace {

// Runs the pieces in `threads` threads, whichever thread comes first.
auto in_threads(std::size_t threads) {
  return [threads](std::size_t pieces, auto&& work) {
    std::atomic<std::size_t> next{0};
    const auto take_pieces = [&] {
      for (std::size_t i = next++; i < pieces; i = next++) work(i);
    };
    std::vector<std::thread> team;
    for (std::size_t t = 1; t < threads; ++t) team.emplace_back(take_pieces);
    take_pieces();
    for (std::thread& each : team) each.join();
  };
}

constexpr auto backwards = [](std::size_t pieces, auto&& work) {
  for (std::size_t i = pieces; i-- > 0;) work(i);
};

constexpr std::size_t piece_elements = std::size_t{32} * 4096;

template <class T>
std::vector<T> widened(const auto& halves) {
  std::vector<T> values;
  for (const auto half : halves) values.push_back(static_cast<T>(lamina::to_float(half)));
  return values;
}

lamina::residual_options with_check(lamina::finite_check check, double momentum = 0) {
  return {.check = check, .momentum = momentum};
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

TEMPLATE_TEST_CASE("residual: the same bits with any execution, in any order, with any number of threads", "",
                   float, double) {
  std::mt19937 random(501);
  for (const std::size_t elements : {piece_elements - 1, piece_elements, piece_elements + 1,
                                     piece_elements + 4096, 2 * piece_elements, 3 * piece_elements + 77}) {
    const lamina::layout model = model_of({5, elements, 7});
    std::vector<std::vector<TestType>> gradients;
    for (int step = 0; step < 2; ++step) gradients.push_back(random_fractions<TestType>(random, elements));
    for (const auto check : {lamina::finite_check::whole_layer, lamina::finite_check::each_element}) {
      for (const double momentum : {0.0, 0.9}) {
        CAPTURE(elements, momentum);
        const auto run = [&](const auto& functor, const auto& execution) {
          lamina::residual_accumulator<TestType> residual(model, with_check(check, momentum));
          std::vector<double> values;
          for (const auto& gradient : gradients) {
            residual.begin_step();
            values.push_back(residual.accumulate(1, gradient, functor, execution));
          }
          return std::pair(values, copy_of(residual.elements()));
        };
        const auto require_same = [&](const auto& functor) {
          const auto expected = run(functor, lamina::sequential{});
          const auto require_equal = [&](const auto& execution) {
            const auto got = run(functor, execution);
            REQUIRE(same_bits(got.first, expected.first));
            REQUIRE(same_bits(got.second, expected.second));
          };
          for (const std::size_t threads : {1, 2, 3, 7}) require_equal(in_threads(threads));
          require_equal(backwards);
          REQUIRE(same_bits(expected.first.back(), functor(std::span(expected.second).subspan(5, elements))));
        };
        require_same(lamina::mean_abs{});
        require_same(lamina::l2_norm{});
      }
    }
  }
}

TEMPLATE_TEST_CASE("residual: an execution gets pieces of 32 blocks, and none for a layer of one", "", float,
                   double) {
  struct row {
    std::size_t elements, pieces;
  };
  for (const row each : {row{0, 0}, row{1, 0}, row{piece_elements, 0}, row{piece_elements + 1, 2},
                         row{2 * piece_elements, 2}, row{2 * piece_elements + 1, 3}}) {
    lamina::residual_accumulator<TestType> residual(model_of({each.elements}),
                                                    with_check(lamina::finite_check::each_element));
    std::vector<std::size_t> calls;
    const auto note = [&](std::size_t pieces, auto&& work) {
      calls.push_back(pieces);
      for (std::size_t i = 0; i < pieces; ++i) work(i);
    };
    const std::vector<TestType> ones(each.elements, TestType(1));
    residual.accumulate(0, ones, lamina::mean_abs{}, note);
    CHECK(calls == (each.pieces == 0 ? std::vector<std::size_t>{} : std::vector<std::size_t>{each.pieces}));
    CHECK(same_bits(residual[0], ones));
  }
}

TEMPLATE_TEST_CASE("residual: with threads, too, NaN and overflow are noticed wherever they stand", "", float,
                   double) {
  const std::size_t elements = 3 * piece_elements + 77;
  const std::vector<TestType> ones(elements, TestType(1));
  for (const std::size_t place : {std::size_t{0}, piece_elements - 1, piece_elements, 2 * piece_elements + 5,
                                  3 * piece_elements, elements - 1}) {
    for (const TestType bad : {nan_value<TestType>, infinity<TestType>, largest<TestType>}) {
      auto gradient = ones;
      gradient[place] = bad;
      lamina::residual_accumulator<TestType> whole(model_of({elements}));
      lamina::residual_accumulator<TestType> blocks(model_of({elements}),
                                                    with_check(lamina::finite_check::each_element));
      auto start = ones;
      start[place] = largest<TestType>;
      whole.accumulate(0, start, lamina::mean_abs{}, in_threads(3));
      blocks.accumulate(0, start, lamina::mean_abs{}, in_threads(3));
      REQUIRE_THROWS_AS(whole.accumulate(0, gradient, lamina::mean_abs{}, in_threads(3)),
                        lamina::non_finite_gradient);
      REQUIRE(same_bits(whole[0], start));
      blocks.accumulate(0, gradient, lamina::mean_abs{}, in_threads(3));
      REQUIRE(blocks.left_out_elements() == 1);
      auto expected = start;
      for (std::size_t i = 0; i < elements; ++i) {
        if (i != place) expected[i] += gradient[i];
      }
      REQUIRE(same_bits(blocks[0], expected));
    }
  }
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
    for (const auto check : {lamina::finite_check::whole_layer, lamina::finite_check::each_element}) {
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
            REQUIRE(same_bits(from_halves.accumulate(1, gradient, lamina::l2_norm{}),
                              from_wide.accumulate(1, wide, lamina::l2_norm{})));
          } else {
            REQUIRE(same_bits(from_halves.accumulate(1, gradient), from_wide.accumulate(1, wide)));
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
  residual.accumulate(0, start);
  for (const auto bits : std::initializer_list<std::uint16_t>{0x7c00, 0xfc00, 0x7c01, 0x7e00, 0xffff}) {
    for (const std::size_t place : {0, 64, 69}) {
      std::vector<lamina::float16> gradient(70);
      gradient[place].bits = bits;
      REQUIRE_THROWS_AS(residual.accumulate(0, gradient), lamina::non_finite_gradient);
      REQUIRE(same_bits(residual[0], start));
    }
  }
  for (const auto bits : std::initializer_list<std::uint16_t>{0x7f80, 0xff80, 0x7f81, 0x7fc0, 0xffff}) {
    std::vector<lamina::bfloat16> gradient(70);
    gradient[69].bits = bits;
    REQUIRE_THROWS_AS(residual.accumulate(0, gradient), lamina::non_finite_gradient);
    REQUIRE(same_bits(residual[0], start));
  }
  const std::vector<lamina::bfloat16> large(70, lamina::bfloat16{0x7f7f});
  if (sizeof(TestType) == 4) {
    REQUIRE_THROWS_AS(residual.accumulate(0, large), lamina::non_finite_gradient);
  } else {
    REQUIRE_NOTHROW(residual.accumulate(0, large));
  }
  REQUIRE(same_bits(residual[0], start));
}

TEMPLATE_TEST_CASE("residual: each_element leaves out the bad number alone, in the residual and the velocity",
                   "", float, double) {
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
        lamina::residual_accumulator<TestType> residual(
            model, with_check(lamina::finite_check::each_element, momentum));
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
          const double value = residual.accumulate(1, gradient);
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

TEMPLATE_TEST_CASE("residual: each_element leaves out what would overflow", "", float, double) {
  const std::size_t elements = 3 * 4096;
  lamina::residual_accumulator<TestType> residual(model_of({elements}),
                                                  with_check(lamina::finite_check::each_element));
  std::vector<TestType> gradient(elements, TestType(1));
  gradient[4096 + 17] = largest<TestType> * TestType(0.75);
  gradient[2 * 4096] = -largest<TestType> * TestType(0.75);
  residual.accumulate(0, gradient);
  CHECK(residual.left_out_elements() == 0);
  auto expected = gradient;
  gradient[2 * 4096] = largest<TestType> * TestType(0.75);  // back to zero, where there is room
  const double value = residual.accumulate(0, gradient);
  CHECK(residual.left_out_elements() == 1);
  for (std::size_t i = 0; i < elements; ++i) {
    if (i != 4096 + 17) expected[i] += gradient[i];
  }
  CHECK(same_bits(residual[0], expected));
  CHECK(same_bits(value, lamina::mean_abs{}(residual[0])));
  // Small gradients on a residual close to the largest number: what fits is added, what does not is left out.
  lamina::residual_accumulator<TestType> full(model_of({2 * 4096}),
                                              with_check(lamina::finite_check::each_element));
  std::vector<TestType> start(2 * 4096, TestType(0));
  start[0] = largest<TestType>;
  full.accumulate(0, start);
  full.accumulate(0, std::vector<TestType>(2 * 4096, TestType(1)));  // rounds to the largest number
  CHECK(full.left_out_elements() == 0);
  std::vector<TestType> half_digit(2 * 4096, TestType(1));
  half_digit[0] = largest<TestType> * std::numeric_limits<TestType>::epsilon();
  full.accumulate(0, half_digit);
  CHECK(full.left_out_elements() == 1);
  CHECK(full[0][0] == largest<TestType>);
  CHECK(full[0][1] == 2);
  CHECK(full[0][4096] == 2);
}

TEMPLATE_TEST_CASE("residual: left_out_elements counts over layers and steps; whole_layer leaves out none",
                   "", float, double) {
  lamina::residual_accumulator<TestType> residual(model_of({10, 4096 + 5}),
                                                  with_check(lamina::finite_check::each_element));
  std::vector<TestType> first(10, TestType(1));
  std::vector<TestType> second(4096 + 5, TestType(1));
  first[3] = nan_value<TestType>;
  second[4096] = infinity<TestType>;
  residual.accumulate(0, first);
  CHECK(residual.left_out_elements() == 1);
  residual.accumulate(1, second);
  CHECK(residual.left_out_elements() == 2);
  second[0] = nan_value<TestType>;
  residual.accumulate(1, second);
  CHECK(residual.left_out_elements() == 4);
  residual.accumulate(1, std::vector<TestType>(4096 + 5, TestType(1)));
  CHECK(residual.left_out_elements() == 4);
  // Every element of a block, and none twice.
  residual.accumulate(1, std::vector<TestType>(4096 + 5, nan_value<TestType>));
  CHECK(residual.left_out_elements() == 4 + 4096 + 5);

  lamina::residual_accumulator<TestType> whole(model_of({10}));
  CHECK_THROWS_AS(whole.accumulate(0, first), lamina::non_finite_gradient);
  CHECK(whole.left_out_elements() == 0);
}

TEMPLATE_TEST_CASE("residual: momentum is u = m u + g, a += u, each rounded by itself", "", float, double) {
  std::mt19937 random(504);
  for (const double momentum : {0.1, 0.5, 0.9, 0.999}) {
    for (const std::size_t length : {1, 63, 64, 65, 300, 4095, 4096, 4097, 8192 + 70}) {
      for (const auto check : {lamina::finite_check::whole_layer, lamina::finite_check::each_element}) {
        CAPTURE(momentum, length);
        lamina::residual_accumulator<TestType> residual(model_of({3, length, 2}),
                                                        with_check(check, momentum));
        REQUIRE(residual.velocity().size() == length + 5);
        std::vector<TestType> a(length);
        std::vector<TestType> u(length);
        const std::vector<TestType> ones(3, TestType(1));
        residual.accumulate(0, ones);
        for (int step = 0; step < 6; ++step) {
          const auto gradient = random_fractions<TestType>(random, length);
          residual.begin_step();
          const double value = residual.accumulate(1, gradient);
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
  for (const auto type :
       {lamina::payload_type::float16, lamina::payload_type::bfloat16, lamina::payload_type::int8}) {
    const std::size_t length = 2 * 4096 + 70;
    lamina::residual_accumulator<TestType> residual(model_of({3, length, 2}), {.momentum = 0.5});
    residual.accumulate(0, std::vector<TestType>(3, TestType(1)));
    residual.accumulate(1, random_fractions<TestType>(random, length));
    residual.accumulate(2, std::vector<TestType>(2, TestType(1)));
    auto expected = copy_of(residual[1]);
    std::vector<std::byte> wire(lamina::payload_bytes<TestType>(type, length));
    lamina::detail::encode_payload(type, residual[1], wire.data());
    std::vector<TestType> sent(length);
    lamina::detail::decode_payload<TestType>(type, wire.data(), length, 0, sent);
    residual.subtract(1, type, wire.data());
    for (std::size_t i = 0; i < length; ++i) expected[i] -= sent[i];
    CHECK(same_bits(residual[1], expected));
    CHECK(same_bits(residual.velocity().subspan(3, length), std::vector<TestType>(length)));
    CHECK(same_bits(residual.velocity().first(3), std::vector<TestType>(3, TestType(1))));
    CHECK(same_bits(residual[2], std::vector<TestType>(2, TestType(1))));
    // What stays counts when the next gradient comes.
    const auto gradient = random_fractions<TestType>(random, length);
    residual.accumulate(1, gradient);
    for (std::size_t i = 0; i < length; ++i) expected[i] += gradient[i];
    CHECK(same_bits(residual[1], expected));
  }
}

TEST_CASE("residual: a momentum below 0 or from 1 on is refused, 0 keeps no velocity") {
  for (const double momentum : {-0.1, 1.0, 1.5, nan_value<double>, infinity<double>, -infinity<double>}) {
    const auto build = [&] { lamina::residual_accumulator<float>(model_of({1}), {.momentum = momentum}); };
    CHECK(contains(message_of<std::invalid_argument>(build), "momentum"));
  }
  CHECK(lamina::residual_accumulator<float>(model_of({7})).velocity().empty());
  CHECK(lamina::residual_accumulator<float>(model_of({7}), {.momentum = 0.5}).velocity().size() == 7);
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
    cleared.accumulate(1, random_fractions<TestType>(random, length));
    cleared.clear(1);
    zeros.restore(std::vector<TestType>(length + 2), {});  // known to be anything, so it is read
    auto expected = gradient;
    for (TestType& each : expected) each += TestType(0);
    const double value = zeros.accumulate(1, gradient);
    REQUIRE(same_bits(zeros[1], expected));
    REQUIRE(same_bits(fresh.accumulate(1, gradient), value));
    REQUIRE(same_bits(fresh[1], expected));
    REQUIRE(same_bits(cleared.accumulate(1, gradient), value));
    REQUIRE(same_bits(cleared[1], expected));
    REQUIRE(same_bits(value, literal_mean_abs<TestType>(expected)));
    // And once more, now that none of them is clear.
    zeros.accumulate(1, gradient);
    fresh.accumulate(1, gradient);
    REQUIRE(same_bits(fresh[1], zeros[1]));
  }
}

TEMPLATE_TEST_CASE("residual: many gradients just below what counts as small add up without an alarm", "",
                   float, double) {
  const TestType most_small =
      std::nextafter(sizeof(TestType) == 4 ? TestType(0x1p100F) : TestType(0x1p990), TestType(0));
  lamina::residual_accumulator<TestType> residual(model_of({3}));
  // The bounds start just below the room they have, and soon leave it.
  std::vector<TestType> a = {largest<TestType> / 4 - 64 * most_small, -largest<TestType> / TestType(4.5), 0};
  residual.restore(a, {});
  const std::vector<TestType> gradient = {most_small, -most_small, most_small};
  for (int step = 0; step < 10'000; ++step) {
    residual.accumulate(0, gradient);
    for (std::size_t i = 0; i < 3; ++i) a[i] += gradient[i];
    REQUIRE(same_bits(residual[0], a));
  }
  const std::vector<TestType> rest = {(largest<TestType> - a[0]) * TestType(0.999), 0, 0};
  CHECK_NOTHROW(residual.accumulate(0, rest));
  CHECK_THROWS_AS(residual.accumulate(0, rest), lamina::non_finite_gradient);
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
                                                with_check(lamina::finite_check::each_element, momentum));
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
        REQUIRE_NOTHROW(whole.accumulate(0, gradient));
      } else {
        ++refused;
        REQUIRE_THROWS_AS(whole.accumulate(0, gradient), lamina::non_finite_gradient);
      }
      each.accumulate(0, gradient);
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
TEMPLATE_TEST_CASE("residual: a large velocity is not forgotten when the residual and the gradient are small",
                   "", float, double) {
  for (const auto check : {lamina::finite_check::whole_layer, lamina::finite_check::each_element}) {
    lamina::residual_accumulator<TestType> residual(model_of({1}), with_check(check, 0.99));
    const auto share = [](double of_largest) {
      return std::vector<TestType>{largest<TestType> * static_cast<TestType>(of_largest)};
    };
    for (const double each :
         {-0.75, 0.7425, 0.95}) {  // u = a = -0.75 of the largest; u about 0; u = 0.95, a = 0.2
      residual.begin_step();
      residual.accumulate(0, share(each));
    }
    residual.begin_step();
    const auto before = copy_of(residual[0]);
    REQUIRE(std::abs(before[0]) < largest<TestType> / 4);
    const std::vector<TestType> zero = {0};  // u = 0.94, a = 1.14 of the largest
    if (check == lamina::finite_check::whole_layer) {
      CHECK_THROWS_AS(residual.accumulate(0, zero), lamina::non_finite_gradient);
    } else {
      residual.accumulate(0, zero);
      CHECK(residual.left_out_elements() == 1);
    }
    CHECK(std::isfinite(residual[0][0]));
    CHECK(same_bits(residual[0], before));
  }
}

TEMPLATE_TEST_CASE("residual: layers at once give what they give one by one, with any threads", "", float,
                   double) {
  std::mt19937 random(508);
  const double momentum = GENERATE(0.0, 0.9);
  for (const auto check : {lamina::finite_check::whole_layer, lamina::finite_check::each_element}) {
    // Empty layers at the ends and in a row, small ones that share a piece, one that fills several.
    const lamina::layout model =
        model_of({0, 3, 0, 0, 70, 4096, 1, 2 * piece_elements + 5, 4097, 0, 9, piece_elements, 5, 0});
    lamina::residual_accumulator<TestType> one_by_one(model, with_check(check, momentum));
    std::vector<lamina::residual_accumulator<TestType>> at_once(5, one_by_one);
    for (int step = 0; step < 3; ++step) {
      std::vector<std::vector<TestType>> gradients;
      for (const std::size_t size : model.sizes())
        gradients.push_back(random_fractions<TestType>(random, size));
      const auto of = [&](std::size_t layer, const auto& visitor) {
        visitor(std::span<const TestType>(gradients[layer]));
      };
      one_by_one.begin_step();
      for (auto& each : at_once) each.begin_step();
      std::vector<double> expected;
      for (std::size_t l = 0; l < model.layers(); ++l) {
        expected.push_back(one_by_one.accumulate(l, gradients[l]));
      }
      for (std::size_t k = 0; k < at_once.size(); ++k) {
        std::vector<double> values(model.layers());
        const std::size_t threads = std::array{1, 2, 3, 7, 64}[k];
        // In one call, and in two.
        const std::size_t cut = k == 2 ? 7 : model.layers();
        at_once[k].accumulate_layers(0, cut, of, std::span(values).first(cut), lamina::mean_abs{},
                                     in_threads(threads));
        at_once[k].accumulate_layers(cut, model.layers(), of, std::span(values).subspan(cut),
                                     lamina::mean_abs{}, in_threads(threads));
        REQUIRE(same_bits(values, expected));
        REQUIRE(same_bits(at_once[k].elements(), one_by_one.elements()));
        REQUIRE(same_bits(at_once[k].velocity(), one_by_one.velocity()));
      }
      one_by_one.clear(4);
      for (auto& each : at_once) each.clear(4);
    }
  }
}

TEMPLATE_TEST_CASE("residual: of layers at once none is added if one of them is refused", "", float, double) {
  const lamina::layout model({{"a", {2}}, {"b", {3}}, {"c", {1}}});
  const double momentum = GENERATE(0.0, 0.5);
  lamina::residual_accumulator<TestType> residual(model, {.momentum = momentum});
  residual.accumulate(1, std::vector<TestType>{1, TestType(0.5) * largest<TestType>, 2});
  const auto elements = copy_of(residual.elements());
  const auto velocity = copy_of(residual.velocity());
  std::vector<double> values(3, -1);
  using gradients = std::vector<std::vector<TestType>>;
  const auto add = [&](const gradients& from, std::span<double> to) {
    residual.accumulate_layers(
        0, 3,
        [&](std::size_t layer, const auto& visitor) { visitor(std::span<const TestType>(from[layer])); }, to);
  };
  const auto message = [&]<class Exception>(const gradients& from, Exception*) {
    const std::string said = message_of<Exception>([&] { add(from, values); });
    CHECK(same_bits(residual.elements(), elements));
    CHECK(same_bits(residual.velocity(), velocity));
    CHECK(values == std::vector<double>(3, -1));
    return said;
  };
  auto* not_finite = static_cast<lamina::non_finite_gradient*>(nullptr);
  auto* invalid = static_cast<std::invalid_argument*>(nullptr);
  CHECK(contains(message({{1, 2}, {3, 4, 5}, {nan_value<TestType>}}, not_finite), "'c'"));
  CHECK(contains(message({{1, -infinity<TestType>}, {3, 4, 5}, {6}}, not_finite), "'a'"));
  CHECK(contains(message({{1, 2}, {3, TestType(0.75) * largest<TestType>, 5}, {6}}, not_finite), "overflow"));
  CHECK(contains(message({{1, 2}, {3, 4, 5}, {6, 7}}, invalid), "'c'"));
  CHECK(contains(message_of<std::invalid_argument>([&] {
                   add({{1, 2}, {3, 4, 5}, {6}}, std::span(values).first(2));
                 }),
                 "2 values of 3 layers"));
  const auto nothing = [](std::size_t, const auto&) {};
  CHECK_THROWS_AS(residual.accumulate_layers(4, 4, nothing, std::span<double>()), std::out_of_range);
  CHECK_THROWS_AS(residual.accumulate_layers(2, 1, nothing, std::span<double>()), std::out_of_range);
  CHECK_THROWS_AS(residual.accumulate_layers(0, 3, nothing, std::span(values)), std::invalid_argument);
  CHECK_NOTHROW(residual.accumulate_layers(3, 3, nothing, std::span<double>()));
  // What was refused left no trace in the bounds either.
  for (int again = 0; again < 3; ++again) {
    message({{largest<TestType>, 1}, {3, TestType(0.75) * largest<TestType>, 5}, {6}}, not_finite);
  }
  add({{1, 2}, {3, 4, 5}, {6}}, values);
  CHECK(residual[2][0] == 6);
  CHECK(values[2] == 6);
  CHECK_NOTHROW(add({{largest<TestType> / 2, 2}, {3, 4, 5}, {6}}, values));
}

TEMPLATE_TEST_CASE("residual: restore puts back what was saved; NaN, infinity and wrong sizes are refused",
                   "", float, double) {
  const lamina::layout model = model_of({2, 0, 3});
  lamina::residual_accumulator<TestType> residual(model, {.momentum = 0.5});
  residual.accumulate(0, std::vector<TestType>{1, 2});
  residual.accumulate(2, std::vector<TestType>{3, 4, 5});
  const auto elements = copy_of(residual.elements());
  const auto velocity = copy_of(residual.velocity());
  using values = std::vector<TestType>;
  const values good = {1, -2, 3, TestType(0.75) * largest<TestType>, -TestType(0)};
  const auto refuses = [&](const values& a, const values& u) {
    CHECK_THROWS_AS(residual.restore(a, u), std::invalid_argument);
    CHECK(same_bits(residual.elements(), elements));
    CHECK(same_bits(residual.velocity(), velocity));
  };
  refuses({}, {});
  refuses({1, 2, 3, 4}, good);
  refuses({1, 2, 3, 4, 5, 6}, good);
  refuses(good, {});
  refuses(good, {1, 2, 3, 4});
  for (const TestType bad : {nan_value<TestType>, infinity<TestType>, -infinity<TestType>}) {
    for (std::size_t place = 0; place < 5; ++place) {
      values broken(5, TestType(1));
      broken[place] = bad;
      refuses(broken, good);
      refuses(good, broken);
    }
  }
  const values u = {5, 6, 7, 8, 9};
  residual.restore(good, u);
  CHECK(same_bits(residual.elements(), good));
  CHECK(same_bits(residual.velocity(), u));
  CHECK(residual.left_out_elements() == 0);
  // Restored numbers count when the next gradient comes, in size and in sum.
  residual.begin_step();
  CHECK_THROWS_AS(residual.accumulate(2, values{0, largest<TestType> / 2, 0}), lamina::non_finite_gradient);
  residual.accumulate(0, values{1, 1});
  CHECK(same_bits(residual[0], values{1 + 3.5, -2 + 4}));

  lamina::residual_accumulator<TestType> plain(model);
  CHECK_THROWS_AS(plain.restore(good, u), std::invalid_argument);
  CHECK_NOTHROW(plain.restore(good, {}));
  CHECK(same_bits(plain.elements(), good));
}
