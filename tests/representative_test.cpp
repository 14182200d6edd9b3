// SPDX-License-Identifier: MIT
#include "lamina/representative.hpp"

#include <cmath>
#include <deque>
#include <list>
#include <random>
#include <ranges>
#include <span>
#include <variant>
#include <vector>

#include "catch.hpp"
#include "support.hpp"

using namespace lamina_test;

namespace {

struct either {
  std::variant<std::span<const float>, std::span<const double>> memory;
};

}  // namespace

template <>
struct lamina::tensor_traits<either> {
  static auto elements(const either& t) { return t.memory; }
};

namespace {

// A functor of a user that has no operand but the element, so that it takes the scalar path.
struct scalar_mean_abs : lamina::detail::callable_representative<scalar_mean_abs> {
  static float map(float x) { return x < 0 ? -x : x; }
  static double map(double x) { return x < 0 ? -x : x; }
  static auto combine(auto a, auto b) { return a + b; }
  static double finish(double total, std::size_t elements) { return total / static_cast<double>(elements); }
};

// Values of all functors by the literal summation order.
template <class T>
void require_literal_values(std::span<const T> x) {
  const double n = static_cast<double>(x.size());
  const double sum_abs = literal_sum_abs(x);
  const double squares = literal_sum_squares(x);
  double largest = 0;
  for (const T each : x) largest = std::max(largest, std::abs(double(each)));
  const bool empty = x.empty();
  REQUIRE(same_bits(lamina::mean_abs{}(x), empty ? 0 : sum_abs / n));
  REQUIRE(same_bits(lamina::l1_norm{}(x), sum_abs));
  REQUIRE(same_bits(lamina::l2_norm{}(x), std::sqrt(squares)));
  REQUIRE(same_bits(lamina::root_mean_square{}(x), empty ? 0 : std::sqrt(squares / n)));
  REQUIRE(same_bits(lamina::max_abs{}(x), largest));
  REQUIRE(same_bits(lamina::signed_mean{}(x), empty ? 0 : literal_sum(x) / n));
  REQUIRE(same_bits(scalar_mean_abs{}(x), empty ? 0 : sum_abs / n));
}

const std::vector<std::size_t> block_lengths = {4095, 4096, 4097,  4159,  4160,  8191,  8192,
                                                8193, 8255, 12289, 65535, 65536, 65537, 65600};

}  // namespace

TEMPLATE_TEST_CASE("representative: the summation order, lengths 0 to 300 at every misalignment", "", float,
                   double) {
  std::mt19937 random(3);
  const std::vector<TestType> memory = random_fractions<TestType>(random, 300 + 16);
  for (std::size_t length = 0; length <= 300; ++length) {
    for (std::size_t misaligned = 0; misaligned < 16; ++misaligned) {
      CAPTURE(length, misaligned);
      require_literal_values(std::span<const TestType>(memory).subspan(misaligned, length));
    }
  }
}

TEMPLATE_TEST_CASE("representative: the summation order around the ends of blocks", "", float, double) {
  std::mt19937 random(4);
  const std::vector<TestType> memory = random_fractions<TestType>(random, 65600 + 16);
  for (const std::size_t length : block_lengths) {
    for (std::size_t misaligned = 0; misaligned<16; misaligned += length> 60000 ? 5 : 1) {
      CAPTURE(length, misaligned);
      require_literal_values(std::span<const TestType>(memory).subspan(misaligned, length));
    }
  }
}

TEMPLATE_TEST_CASE("representative: a list, a deque and a lazy view give the bits of a vector", "", float,
                   double) {
  std::mt19937 random(5);
  for (const std::size_t length : {0, 1, 2, 63, 64, 65, 127, 300, 4095, 4096, 4097, 8192, 8193, 12345}) {
    const auto vector = random_fractions<TestType>(random, length);
    const std::list<TestType> list(vector.begin(), vector.end());
    const std::deque<TestType> deque(vector.begin(), vector.end());
    const auto lazy = vector | std::views::transform([](TestType x) { return x + 0; });
    const auto require_same = [&](const auto& functor) {
      const double expected = functor(vector);
      REQUIRE(same_bits(functor(std::span(vector)), expected));
      REQUIRE(same_bits(functor(list), expected));
      REQUIRE(same_bits(functor(deque), expected));
      REQUIRE(same_bits(functor(lazy), expected));
    };
    require_same(lamina::mean_abs{});
    require_same(lamina::l1_norm{});
    require_same(lamina::l2_norm{});
    require_same(lamina::root_mean_square{});
    require_same(lamina::max_abs{});
    require_same(lamina::signed_mean{});
  }
}

TEST_CASE("representative: lanes, fold and blocks by hand") {
  const double large = 16777216;  // 2^24, to which a float cannot add 1
  const auto sum_with_ones_at = [&](std::size_t first, std::size_t second) {
    std::vector<float> x(2 * 4096);
    x[0] = static_cast<float>(large);
    x[first] = x[second] = 1;
    return lamina::l1_norm{}(x);
  };
  CHECK(sum_with_ones_at(64, 128) == large);      // one after the other in the lane of the large one
  CHECK(sum_with_ones_at(1, 65) == large + 2);    // together in a lane of their own
  CHECK(sum_with_ones_at(1, 33) == large + 2);    // lanes 1 and 33 fold first
  CHECK(sum_with_ones_at(1, 2) == large);         // lane 2 folds into lane 0, then lane 1
  CHECK(sum_with_ones_at(1, 4096) == large + 1);  // blocks add up in double
  CHECK(sum_with_ones_at(4095, 8191) == large + 1);
}

TEMPLATE_TEST_CASE("representative: values by hand", "", float, double) {
  const std::vector<TestType> x = {3, -4, 0, 0};
  CHECK(lamina::mean_abs{}(x) == 1.75);
  CHECK(lamina::l1_norm{}(x) == 7);
  CHECK(lamina::l2_norm{}(x) == 5);
  CHECK(lamina::root_mean_square{}(x) == 2.5);
  CHECK(lamina::max_abs{}(x) == 4);
  CHECK(lamina::signed_mean{}(x) == -0.25);
}

TEMPLATE_TEST_CASE("representative: an empty tensor gives 0", "", float, double) {
  const std::vector<TestType> none;
  const std::list<TestType> no_list;
  CHECK(same_bits(lamina::mean_abs{}(none), 0.0));
  CHECK(same_bits(lamina::l1_norm{}(none), 0.0));
  CHECK(same_bits(lamina::l2_norm{}(none), 0.0));
  CHECK(same_bits(lamina::root_mean_square{}(none), 0.0));
  CHECK(same_bits(lamina::max_abs{}(none), 0.0));
  CHECK(same_bits(lamina::signed_mean{}(none), 0.0));
  CHECK(same_bits(lamina::mean_abs{}(no_list), 0.0));
}

TEST_CASE("representative: squares of floats are exact and do not overflow in float") {
  const std::vector<float> large(3, 1e30F);
  CHECK(std::isfinite(lamina::l2_norm{}(large)));
  CHECK(lamina::root_mean_square{}(std::vector<float>(64, 0x1p-100F)) == 0x1p-100);
}

TEST_CASE("representative: the sign of the elements does not change mean_abs but does change signed_mean") {
  const std::vector<float> falling(100, -0.5F);
  CHECK(lamina::mean_abs{}(falling) == 0.5);
  CHECK(lamina::signed_mean{}(falling) == -0.5);
}

TEST_CASE("representative: a tensor whose type is known at run time gives the bits of its span") {
  std::mt19937 random(7);
  const auto singles = random_fractions<float>(random, 5000);
  const auto doubles = random_fractions<double>(random, 5000);
  CHECK(same_bits(lamina::mean_abs{}(either{std::span(singles)}), lamina::mean_abs{}(singles)));
  CHECK(same_bits(lamina::l2_norm{}(either{std::span(doubles)}), lamina::l2_norm{}(doubles)));
}
