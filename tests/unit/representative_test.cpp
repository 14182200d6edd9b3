// SPDX-License-Identifier: MIT
#include "lamina/representative.hpp"

#include "accumulate.hpp"
#include "catch.hpp"
#include "executions.hpp"
#include "kernel_cases.hpp"
#include "lamina/local/delta.hpp"
#include "steps.hpp"

namespace lamina_test::representative_test {

TEST_CASE("reduction: any number of totals is combined as the levels say") {
  std::mt19937 random(41);
  const auto fractions = random_fractions<double>(random, telling_counts_of_totals().back());
  const auto check = [&](const auto& functor) {
    for (const std::size_t count : telling_counts_of_totals()) {
      const auto totals = std::span(fractions).first(count);
      const double literal = literal_total_of_totals(
          {totals.begin(), totals.end()}, [&](double a, double b) { return functor.combine(a, b); });
      CAPTURE(count);
      REQUIRE(same_bits(lamina::detail::finished_value(functor, totals, 1), literal));
    }
  };
  check(tells_order{});
  check(lamina::l1_norm{});
  check(lamina::max_abs{});
  CHECK(same_bits(lamina::detail::finished_value(lamina::mean_abs{}, {}, 0), 0.0));  // 0 of 0 elements
}

// Two runs of blocks and a block, taken at once, with gradients added and without, and as a difference.
TEMPLATE_TEST_CASE("reduction: one order wherever the totals come from", "", float, double) {
  std::mt19937 random(42);
  const lamina::layout model = model_of({3, 128 * 4096 + 70, 5});
  const auto gradient = rounding_gradients<TestType>(random, model);
  const auto zeros = zeros_like<TestType>(model);
  const auto check = [&]<class F>(F functor, double expected) {
    CHECK(same_bits(functor(gradient[1]), expected));
    lamina::residual_accumulator<TestType> residual(model);
    CHECK(same_bits(accumulate(residual, 1, gradient[1], functor), expected));
    residual.clear(1);
    CHECK(same_bits(accumulate(residual, 1, gradient[1], functor, in_reverse), expected));
    lamina::worker<TestType, F> worker(model, {}, functor);
    CHECK(same_bits(worker.add(gradient, 1, in_reverse).values()[1], expected));
    lamina::local_delta<TestType, F> delta(model, {}, functor);
    CHECK(same_bits(delta.observe_all(gradient, zeros, in_reverse)[1], expected));
  };
  const std::span<const TestType> elements(gradient[1]);
  check(lamina::l1_norm{}, literal_sum_abs(elements));
  check(lamina::l2_norm{}, std::sqrt(literal_sum_squares(elements)));
  check(signed_mean{}, literal_sum(elements) / static_cast<double>(elements.size()));
}

TEST_CASE("execution: what runs tasks is one, and is heard if it says how many threads it has") {
  const auto lambda = [](std::size_t tasks, auto&& work) {
    for (std::size_t i = 0; i < tasks; ++i) work(i);
  };
  struct with_a_member {
    int threads = 4;  // a number and no function: not what is meant
  };
  STATIC_REQUIRE(lamina::execution<pool>);
  STATIC_REQUIRE(lamina::execution<decltype(lambda)>);
  STATIC_REQUIRE(lamina::execution<lamina::sequential>);
  STATIC_REQUIRE_FALSE(lamina::execution<int>);
  CHECK(lamina::detail::threads_of(pool{7}) == 7);
  CHECK(lamina::detail::threads_of(lamina::sequential{}) == 1);
  CHECK(lamina::detail::threads_of(lambda) == 0);
  CHECK(lamina::detail::threads_of(with_a_member{}) == 0);
  std::vector<std::size_t> ran;
  lamina::sequential{}(4, [&](std::size_t task) { ran.push_back(task); });
  CHECK(ran == std::vector<std::size_t>{0, 1, 2, 3});
}

// As the comment on lamina::representative has them: one text for elements and registers, and one for elements only, in
// whose body a register would not compile.
struct own_largest {
  using is_simd = void;
  static auto map(const auto& x) { return lamina::abs(x); }
  static auto combine(const auto& a, const auto& b) { return lamina::max(a, b); }
  static double finish(double total, std::size_t) { return total; }
};
struct own_of_elements {
  auto map(auto x) const { return std::abs(x); }
  auto combine(auto a, auto b) const { return a + b; }
  double finish(double total, std::size_t elements) const { return total / static_cast<double>(elements); }
};
// The totals of blocks would be added in float.
struct adds_in_float {
  float map(float x) const { return x; }
  float combine(float a, float b) const { return a + b; }
  double finish(double total, std::size_t) const { return total; }
};
static_assert(lamina::representative<own_largest>);
static_assert(lamina::representative<own_of_elements>);
static_assert(!lamina::representative<adds_in_float>);

TEST_CASE("representative: what a functor maps to may be a class") {
  struct lane {
    lane() = default;
    explicit lane(double value) : sum(value) {}
    operator double() const { return sum; }
    double sum = 0;
  };
  struct own_sum {
    lane map(float x) const { return lane(x); }
    lane combine(const lane& a, const lane& b) const { return lane(a.sum + b.sum); }
    double combine(double a, double b) const { return a + b; }
    double finish(double total, std::size_t) const { return total; }
  };
  static_assert(lamina::representative<own_sum>);
  CHECK(lamina::representative_value(own_sum{}, std::vector<float>(100, 0.5F)) == 50);
}

TEMPLATE_TEST_CASE("representative: a functor of the user's own", "", float, double) {
  std::mt19937 random(8);
  const auto values = random_fractions<TestType>(random, 9001);
  lamina::residual_accumulator<TestType> residual(model_of({values.size()}));
  CHECK(same_bits(lamina::representative_value(own_largest{}, values), lamina::max_abs{}(values)));
  CHECK(same_bits(accumulate(residual, 0, values, own_largest{}), lamina::max_abs{}(values)));
  CHECK(same_bits(lamina::representative_value(own_of_elements{}, values), lamina::mean_abs{}(values)));
  const double value = accumulate(residual, 0, values, own_of_elements{});
  CHECK(same_bits(value, lamina::mean_abs{}(residual[0])));
}

TEMPLATE_TEST_CASE("representative: NaN wins in max_abs, as infinity, anywhere", "", float, double) {
  for (const std::size_t count : {1U, 63U, 64U, 200U, 4096U, 8200U}) {
    for (const std::size_t at : {std::size_t{0}, count / 3, count / 2, count - 1}) {
      std::vector<TestType> values(count, TestType(2));
      values[at] = -std::numeric_limits<TestType>::quiet_NaN();
      CHECK(lamina::max_abs{}(values) == std::numeric_limits<double>::infinity());
    }
  }
}

}  // namespace lamina_test::representative_test
