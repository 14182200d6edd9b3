// SPDX-License-Identifier: MIT
#include "lamina/representative.hpp"

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <variant>
#include <vector>

#include "accumulate.hpp"
#include "catch.hpp"
#include "lamina/residual.hpp"
#include "support.hpp"

namespace lamina_test::representative_test {

namespace {

struct either {
  std::variant<std::span<const float>, std::span<const double>> memory;
};

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

}  // namespace

}  // namespace lamina_test::representative_test

template <>
struct lamina::tensor_traits<lamina_test::representative_test::either> {
  static auto elements(const lamina_test::representative_test::either& t) { return t.memory; }
};

namespace lamina_test::representative_test {

TEST_CASE("representative: a tensor whose type is known at run time gives the bits of its span") {
  std::mt19937 random(7);
  const auto singles = random_fractions<float>(random, 5000);
  const auto doubles = random_fractions<double>(random, 5000);
  CHECK(same_bits(lamina::mean_abs{}(either{std::span(singles)}), lamina::mean_abs{}(singles)));
  CHECK(same_bits(lamina::l2_norm{}(either{std::span(doubles)}), lamina::l2_norm{}(doubles)));
}

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

TEMPLATE_TEST_CASE("representative: a functor of the user's own, with registers and without", "", float,
                   double) {
  std::mt19937 random(8);
  const auto values = random_fractions<TestType>(random, 9001);
  lamina::residual_accumulator<TestType> residual(model_of({values.size()}));
  CHECK(same_bits(lamina::representative_value(own_largest{}, values), lamina::max_abs{}(values)));
  CHECK(same_bits(accumulate(residual, 0, values, own_largest{}), lamina::max_abs{}(values)));
  CHECK(same_bits(lamina::representative_value(own_of_elements{}, values), lamina::mean_abs{}(values)));
  const double value = accumulate(residual, 0, values, own_of_elements{});
  CHECK(same_bits(value, lamina::mean_abs{}(residual[0])));
}

TEMPLATE_TEST_CASE("representative: NaN wins in max_abs, as infinity, wherever it stands", "", float,
                   double) {
  constexpr TestType not_a_number = std::numeric_limits<TestType>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const std::size_t count : {1U, 63U, 64U, 200U, 4096U, 8200U}) {
    for (const std::size_t at : {std::size_t{0}, count / 3, count / 2, count - 1}) {
      std::vector<TestType> values(count, TestType(2));
      values[at] = not_a_number;
      CHECK(lamina::max_abs{}(values) == infinity);
      values[at] = -not_a_number;
      CHECK(lamina::max_abs{}(values) == infinity);
      values[at] = TestType(-3);
      CHECK(lamina::max_abs{}(values) == 3);
    }
  }
}

}  // namespace lamina_test::representative_test
