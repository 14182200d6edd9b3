// SPDX-License-Identifier: MIT
#include "lamina/residual.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <limits>
#include <random>
#include <thread>

#include "accumulate.hpp"
#include "catch.hpp"
#include "residual_cases.hpp"
#include "support.hpp"

using namespace lamina_test;

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
        const double value = accumulate(residual, l, gradient);
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
    accumulate(residual, 0, gradient);
  }
  for (std::size_t i = 0; i < 100; ++i) REQUIRE(residual[0][i] == static_cast<TestType>(sums[i]));
}

TEMPLATE_TEST_CASE("residual: clear zeroes one layer and leaves its neighbours", "", float, double) {
  lamina::residual_accumulator<TestType> residual(model_of({2, 3, 2}));
  accumulate(residual, 0, std::vector<TestType>{1, 2});
  accumulate(residual, 1, std::vector<TestType>{3, 4, 5});
  accumulate(residual, 2, std::vector<TestType>{6, 7});
  residual.clear(1);
  CHECK(same_bits(residual[0], std::vector<TestType>{1, 2}));
  CHECK(same_bits(residual[1], std::vector<TestType>{0, 0, 0}));
  CHECK(same_bits(residual[2], std::vector<TestType>{6, 7}));
  CHECK(accumulate(residual, 1, std::vector<TestType>{1, 1, 1}) == 1);
}

TEMPLATE_TEST_CASE("residual: an empty layer has the value 0", "", float, double) {
  lamina::residual_accumulator<TestType> residual(model_of({0, 1}));
  CHECK(same_bits(accumulate(residual, 0, std::vector<TestType>{}), 0.0));
  CHECK(same_bits(accumulate(residual, 0, std::vector<TestType>{}, lamina::l2_norm{}), 0.0));
  CHECK(residual[0].empty());
}

TEMPLATE_TEST_CASE("residual: overflow by many harmless steps is noticed at the step that does it", "", float,
                   double) {
  lamina::residual_accumulator<TestType> residual(model_of({5}));
  const std::vector<TestType> tenth(5, largest<TestType> / 16);
  int accepted = 0;
  try {
    for (; accepted < 100; ++accepted) accumulate(residual, 0, tenth);
  } catch (const lamina::non_finite_gradient&) {
  }
  // 15/16 is left room for, 16/16 rounds to the largest number or beyond it.
  CHECK(accepted >= 15);
  CHECK(accepted <= 16);
  for (const TestType each : residual[0]) CHECK(std::isfinite(each));
}

TEMPLATE_TEST_CASE("residual: clearing one layer does not lose track of another's magnitude", "", float,
                   double) {
  lamina::residual_accumulator<TestType> residual(model_of({1, 1, 1}));
  // Less than half of the largest, so that it is the bound kept for the layer that gives the alarm.
  const std::vector<TestType> much = {largest<TestType> * TestType(0.45)};
  for (std::size_t l = 0; l < 3; ++l) {
    accumulate(residual, l, much);
    accumulate(residual, l, much);
  }
  residual.clear(1);
  CHECK_THROWS_AS(accumulate(residual, 0, much), lamina::non_finite_gradient);
  CHECK_THROWS_AS(accumulate(residual, 2, much), lamina::non_finite_gradient);
  CHECK_NOTHROW(accumulate(residual, 1, much));
  CHECK(std::isfinite(residual[0][0]));
}

TEMPLATE_TEST_CASE("residual: a refused gradient leaves no trace in what is accepted after it", "", float,
                   double) {
  lamina::residual_accumulator<TestType> residual(model_of({1}));
  accumulate(residual, 0, std::vector<TestType>{1});
  CHECK_THROWS_AS(accumulate(residual, 0, std::vector<TestType>{nan_value<TestType>}),
                  lamina::non_finite_gradient);
  accumulate(residual, 0, std::vector<TestType>{largest<TestType> / 4});
  CHECK(residual[0][0] == TestType(1) + largest<TestType> / 4);
}

TEMPLATE_TEST_CASE("residual: a wrong layer or size is refused with both sizes, and nothing changes", "",
                   float, double) {
  const lamina::layout model({{"weight", {2, 3}}, {"bias", {2}}});
  lamina::residual_accumulator<TestType> residual(model);
  accumulate(residual, 0, std::vector<TestType>(6, TestType(1)));
  const auto before = copy_of(residual[0]);
  const auto wrong_size = [&] { accumulate(residual, 0, std::vector<TestType>(5, TestType(1))); };
  const std::string message = message_of<std::invalid_argument>(wrong_size);
  CHECK(contains(message, "'weight'"));
  CHECK(contains(message, "[2, 3]"));
  CHECK(contains(message, "6 elements"));
  CHECK(contains(message, "5 elements"));
  CHECK_THROWS_AS(accumulate(residual, 2, std::vector<TestType>(2)), std::out_of_range);
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

}  // namespace

TEMPLATE_TEST_CASE("residual: the same bits with any execution, in any order, with any number of threads", "",
                   float, double) {
  std::mt19937 random(501);
  for (const std::size_t elements : {piece_elements - 1, piece_elements, piece_elements + 1,
                                     piece_elements + 4096, 2 * piece_elements, 3 * piece_elements + 77}) {
    const lamina::layout model = model_of({5, elements, 7});
    std::vector<std::vector<TestType>> gradients;
    for (int step = 0; step < 2; ++step) gradients.push_back(random_fractions<TestType>(random, elements));
    for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
      for (const double momentum : {0.0, 0.9}) {
        CAPTURE(elements, momentum);
        const auto run = [&](const auto& functor, const auto& execution) {
          lamina::residual_accumulator<TestType> residual(model, with_check(check, momentum));
          std::vector<double> values;
          for (const auto& gradient : gradients) {
            residual.begin_step();
            values.push_back(accumulate(residual, 1, gradient, functor, execution));
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
                                                    with_check(lamina::non_finite::skip));
    std::vector<std::size_t> calls;
    const auto note = [&](std::size_t pieces, auto&& work) {
      calls.push_back(pieces);
      for (std::size_t i = 0; i < pieces; ++i) work(i);
    };
    const std::vector<TestType> ones(each.elements, TestType(1));
    accumulate(residual, 0, ones, lamina::mean_abs{}, note);
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
                                                    with_check(lamina::non_finite::skip));
      auto start = ones;
      start[place] = largest<TestType>;
      accumulate(whole, 0, start, lamina::mean_abs{}, in_threads(3));
      accumulate(blocks, 0, start, lamina::mean_abs{}, in_threads(3));
      REQUIRE_THROWS_AS(accumulate(whole, 0, gradient, lamina::mean_abs{}, in_threads(3)),
                        lamina::non_finite_gradient);
      REQUIRE(same_bits(whole[0], start));
      accumulate(blocks, 0, gradient, lamina::mean_abs{}, in_threads(3));
      REQUIRE(blocks.left_out_elements() == 1);
      auto expected = start;
      for (std::size_t i = 0; i < elements; ++i) {
        if (i != place) expected[i] += gradient[i];
      }
      REQUIRE(same_bits(blocks[0], expected));
    }
  }
}

TEMPLATE_TEST_CASE("residual: left_out_elements counts over layers and steps; refuse leaves out none", "",
                   float, double) {
  lamina::residual_accumulator<TestType> residual(model_of({10, 4096 + 5}),
                                                  with_check(lamina::non_finite::skip));
  std::vector<TestType> first(10, TestType(1));
  std::vector<TestType> second(4096 + 5, TestType(1));
  first[3] = nan_value<TestType>;
  second[4096] = infinity<TestType>;
  accumulate(residual, 0, first);
  CHECK(residual.left_out_elements() == 1);
  accumulate(residual, 1, second);
  CHECK(residual.left_out_elements() == 2);
  second[0] = nan_value<TestType>;
  accumulate(residual, 1, second);
  CHECK(residual.left_out_elements() == 4);
  accumulate(residual, 1, std::vector<TestType>(4096 + 5, TestType(1)));
  CHECK(residual.left_out_elements() == 4);
  // Every element of a block, and none twice.
  accumulate(residual, 1, std::vector<TestType>(4096 + 5, nan_value<TestType>));
  CHECK(residual.left_out_elements() == 4 + 4096 + 5);

  lamina::residual_accumulator<TestType> whole(model_of({10}));
  CHECK_THROWS_AS(accumulate(whole, 0, first), lamina::non_finite_gradient);
  CHECK(whole.left_out_elements() == 0);
}

TEST_CASE("residual: a momentum below 0 or from 1 on is refused, 0 keeps no velocity") {
  for (const double momentum : {-0.1, 1.0, 1.5, nan_value<double>, infinity<double>, -infinity<double>}) {
    const auto build = [&] { lamina::residual_accumulator<float>(model_of({1}), {.momentum = momentum}); };
    CHECK(contains(message_of<std::invalid_argument>(build), "momentum"));
  }
  CHECK(lamina::residual_accumulator<float>(model_of({7})).velocity().empty());
  CHECK(lamina::residual_accumulator<float>(model_of({7}), {.momentum = 0.5}).velocity().size() == 7);
}

TEMPLATE_TEST_CASE("residual: many gradients of large numbers add up without a refusal", "", float, double) {
  const TestType most_small =
      std::nextafter(sizeof(TestType) == 4 ? TestType(0x1p100F) : TestType(0x1p990), TestType(0));
  lamina::residual_accumulator<TestType> residual(model_of({3}));
  // Sums of a quarter of the range and more, none of which is beyond it.
  std::vector<TestType> a = {largest<TestType> / 4 - 64 * most_small, -largest<TestType> / TestType(4.5), 0};
  residual.restore(a, {});
  const std::vector<TestType> gradient = {most_small, -most_small, most_small};
  for (int step = 0; step < 10'000; ++step) {
    accumulate(residual, 0, gradient);
    for (std::size_t i = 0; i < 3; ++i) a[i] += gradient[i];
    REQUIRE(same_bits(residual[0], a));
  }
  const std::vector<TestType> rest = {(largest<TestType> - a[0]) * TestType(0.999), 0, 0};
  CHECK_NOTHROW(accumulate(residual, 0, rest));
  CHECK_THROWS_AS(accumulate(residual, 0, rest), lamina::non_finite_gradient);
}

TEMPLATE_TEST_CASE("residual: a large velocity is not forgotten when the residual and the gradient are small",
                   "", float, double) {
  for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
    lamina::residual_accumulator<TestType> residual(model_of({1}), with_check(check, 0.99));
    const auto share = [](double of_largest) {
      return std::vector<TestType>{largest<TestType> * static_cast<TestType>(of_largest)};
    };
    for (const double each :
         {-0.75, 0.7425, 0.95}) {  // u = a = -0.75 of the largest; u about 0; u = 0.95, a = 0.2
      residual.begin_step();
      accumulate(residual, 0, share(each));
    }
    residual.begin_step();
    const auto before = copy_of(residual[0]);
    REQUIRE(std::abs(before[0]) < largest<TestType> / 4);
    const std::vector<TestType> zero = {0};  // u = 0.94, a = 1.14 of the largest
    if (check == lamina::non_finite::refuse) {
      CHECK_THROWS_AS(accumulate(residual, 0, zero), lamina::non_finite_gradient);
    } else {
      accumulate(residual, 0, zero);
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
  for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
    // Empty layers at the ends and in a row, small ones that share a piece, one that fills several.
    const lamina::layout model =
        model_of({0, 3, 0, 0, 70, 4096, 1, 2 * piece_elements + 5, 4097, 0, 9, piece_elements, 5, 0});
    lamina::residual_accumulator<TestType> one_by_one(model, with_check(check, momentum));
    std::deque<lamina::residual_accumulator<TestType>> at_once;
    for (int k = 0; k < 5; ++k) at_once.emplace_back(model, with_check(check, momentum));
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
        expected.push_back(accumulate(one_by_one, l, gradients[l]));
      }
      for (std::size_t k = 0; k < at_once.size(); ++k) {
        std::vector<double> values(model.layers());
        const std::size_t threads = std::array{1, 2, 3, 7, 64}[k];
        // In one call, and in two.
        const std::size_t cut = k == 2 ? 7 : model.layers();
        at_once[k].accumulate(0, cut, of, std::span(values).first(cut), lamina::mean_abs{},
                              in_threads(threads));
        at_once[k].accumulate(cut, model.layers(), of, std::span(values).subspan(cut), lamina::mean_abs{},
                              in_threads(threads));
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
  accumulate(residual, 1, std::vector<TestType>{1, TestType(0.5) * largest<TestType>, 2});
  const auto elements = copy_of(residual.elements());
  const auto velocity = copy_of(residual.velocity());
  std::vector<double> values(3, -1);
  using gradients = std::vector<std::vector<TestType>>;
  const auto add = [&](const gradients& from, std::span<double> to) {
    const auto refused = residual.accumulate(
        0, 3,
        [&](std::size_t layer, const auto& visitor) { visitor(std::span<const TestType>(from[layer])); }, to);
    if (refused) throw lamina::non_finite_gradient(*refused, *refused, model[*refused].name, "");
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
  CHECK(contains(message({{1, 2}, {3, TestType(0.75) * largest<TestType>, 5}, {6}}, not_finite), "'b'"));
  CHECK(contains(message({{1, 2}, {3, 4, 5}, {6, 7}}, invalid), "'c'"));
  CHECK(contains(message_of<std::invalid_argument>([&] {
                   add({{1, 2}, {3, 4, 5}, {6}}, std::span(values).first(2));
                 }),
                 "2 values of 3 layers"));
  const auto nothing = [](std::size_t, const auto&) {};
  CHECK_THROWS_AS(residual.accumulate(4, 4, nothing, std::span<double>()), std::out_of_range);
  CHECK_THROWS_AS(residual.accumulate(2, 1, nothing, std::span<double>()), std::out_of_range);
  CHECK_NOTHROW(residual.accumulate(0, 3, nothing, std::span(values)));
  CHECK_FALSE(residual.was_given(0));
  CHECK_NOTHROW(residual.accumulate(3, 3, nothing, std::span<double>()));
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
  accumulate(residual, 0, std::vector<TestType>{1, 2});
  accumulate(residual, 2, std::vector<TestType>{3, 4, 5});
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
  CHECK_THROWS_AS(accumulate(residual, 2, values{0, largest<TestType> / 2, 0}), lamina::non_finite_gradient);
  accumulate(residual, 0, values{1, 1});
  CHECK(same_bits(residual[0], values{1 + 3.5, -2 + 4}));

  lamina::residual_accumulator<TestType> plain(model);
  CHECK_THROWS_AS(plain.restore(good, u), std::invalid_argument);
  CHECK_NOTHROW(plain.restore(good, {}));
  CHECK(same_bits(plain.elements(), good));
}
