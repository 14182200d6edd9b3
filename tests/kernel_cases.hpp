// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "lamina/half.hpp"
#include "lamina/representative.hpp"
#include "placed.hpp"
#include "support.hpp"

/// What the tests of the summation order share: values that are hard to add up, every functor, and what it should give.
namespace lamina_test {

enum class kind { fractions, integers, denormals, negative_zeros, huge, tiny, alternating, equal };
inline constexpr std::array kinds = {kind::fractions, kind::integers, kind::denormals,   kind::negative_zeros,
                                     kind::huge,      kind::tiny,     kind::alternating, kind::equal};

/// What is computed with: T itself, float for the half-width types.
template <class G>
using computed_type = std::conditional_t<lamina::half_element<G>, float, G>;

/// `count` numbers of the kind. Two such sequences can be added, and 2^18 such sums, without overflow in G.
template <class G>
std::vector<G> values_of(kind of, std::mt19937& random, std::size_t count) {
  if constexpr (lamina::half_element<G>) {
    std::vector<G> halves;
    for (const float value : values_of<float>(of, random, count)) {
      G half = lamina::saturating_round<G>(value);
      // float's denormals are zeros of float16, which has its own.
      if (of == kind::denormals) half.bits = static_cast<std::uint16_t>(random() & 0x807fU);
      halves.push_back(half);
    }
    return halves;
  } else {
    using limits = std::numeric_limits<G>;
    std::vector<G> values = of == kind::integers    ? random_integers<G>(random, count, 1000)
                            : of == kind::denormals ? random_integers<G>(random, count, std::size_t{1} << 20U)
                                                    : random_fractions<G>(random, count);
    for (std::size_t i = 0; i < count; ++i) {
      G& x = values[i];
      if (of == kind::denormals) x *= limits::denorm_min();
      if (of == kind::negative_zeros) x = -G(0);
      if (of == kind::huge) x = std::ldexp(x, limits::max_exponent - 26);  // |x| < 37 before
      if (of == kind::tiny) x *= limits::min();
      if (of == kind::alternating) x = i % 2 == 0 ? std::abs(x) : -std::abs(x);
      if (of == kind::equal) x = G(0.1);
    }
    if (of == kind::huge && count > 0) values[count / 2] = limits::max() / 4;
    return values;
  }
}

/// A functor as a user writes one, applied to whole registers: its map ends in a product, which must not be fused with
/// the sum that follows.
struct own_square_sum : lamina::detail::callable_representative<own_square_sum> {
  using is_simd = void;
  static auto map(const auto& x) { return x * x; }
  static auto combine(const auto& a, const auto& b) { return a + b; }
  static double finish(double total, std::size_t) { return total; }
};

/// One that does not say that it takes registers, so that it takes the scalar path.
struct own_scalar_mean_abs : lamina::detail::callable_representative<own_scalar_mean_abs> {
  static float map(float x) { return x < 0 ? -x : x; }
  static double map(double x) { return x < 0 ? -x : x; }
  static auto combine(auto a, auto b) { return a + b; }
  static double finish(double total, std::size_t elements) { return total / static_cast<double>(elements); }
};

inline constexpr std::array functor_names = {
    "mean_abs", "l1_norm",     "l2_norm",        "root_mean_square",
    "max_abs",  "signed_mean", "own_square_sum", "own_scalar_mean_abs"};

/// Calls visit(index, functor) for each functor, in the order of functor_names.
void for_each_functor(const auto& visit) {
  const auto visit_all = [&]<std::size_t... Index>(std::index_sequence<Index...>, const auto&... functors) {
    (visit(Index, functors), ...);
  };
  visit_all(std::make_index_sequence<functor_names.size()>{}, lamina::mean_abs{}, lamina::l1_norm{},
            lamina::l2_norm{}, lamina::root_mean_square{}, lamina::max_abs{}, signed_mean{}, own_square_sum{},
            own_scalar_mean_abs{});
}

/// The same for one functor of each kernel: l1_norm and root_mean_square go over the elements as mean_abs and l2_norm do, from
/// which only finish() tells them. golden_test.cpp has them all.
void for_each_kernel(const auto& visit) {
  visit(0, lamina::mean_abs{});
  visit(2, lamina::l2_norm{});
  visit(4, lamina::max_abs{});
  visit(5, signed_mean{});
  visit(6, own_square_sum{});
  visit(7, own_scalar_mean_abs{});
}

/// What each functor should give, by the literal summation order.
template <class T>
std::array<double, functor_names.size()> literal_values(const std::vector<T>& values) {
  const std::span<const T> x(values);
  const double n = static_cast<double>(std::max<std::size_t>(x.size(), 1));
  const double sum_abs = literal_sum_abs(x);
  const double squares = literal_sum_squares(x);
  const double own_squares = literal_total(
      x, [](T v) { return v * v; }, [](auto a, auto b) { return a + b; });
  double largest = 0;
  for (const T each : x) largest = std::max(largest, std::abs(static_cast<double>(each)));
  return {sum_abs / n,        sum_abs,     std::sqrt(squares), std::sqrt(squares / n), largest,
          literal_sum(x) / n, own_squares, sum_abs / n};
}

/// REQUIRE(same_bits(got, expected)) for millions of calls: a memcmp, and describe() is called if it fails.
void require_same_bits(double got, double expected, const auto& describe) {
  if (!same_bits(got, expected)) FAIL("the bits differ: " << describe());
}
template <class T>
void require_same_bits(std::span<const T> got, const std::vector<T>& expected, const auto& describe) {
  const bool same = got.size() == expected.size() &&
                    (got.empty() || std::memcmp(got.data(), expected.data(), got.size_bytes()) == 0);
  if (!same) FAIL("the bits of the elements differ: " << describe());
}

}  // namespace lamina_test
