// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <type_traits>

#include "lamina/detail/residual_block.hpp"
#include "lamina/half.hpp"
#include "support.hpp"

/// What the tests of the summation order share: values that are hard to add up, and what functors should give.
namespace lamina_test {

/// What is computed with: T itself, float for the half-width types.
template <class G>
using computed_type = std::conditional_t<lamina::half_element<G>, float, G>;

enum class kind { fractions, integers, denormals, negative_zeros, huge, tiny, alternating };
inline constexpr std::array kinds = {kind::fractions, kind::integers, kind::denormals,  kind::negative_zeros,
                                     kind::huge,      kind::tiny,     kind::alternating};

/// Integers of the mantissa's width times powers of two, since what rounds here may be fused. 2^13 of them can be added.
template <class T>
T number_of(kind of, std::mt19937& random) {
  using limits = std::numeric_limits<T>;
  std::int64_t integer = static_cast<std::int32_t>(random()) / 256;
  if (sizeof(T) == 8) integer = integer * (1 << 28) + static_cast<std::int64_t>(random() % (1U << 28U));
  const int spread = static_cast<int>(random() % 12);
  const auto scaled = [&](int exponent) { return std::ldexp(static_cast<T>(integer), exponent); };
  switch (of) {
    case kind::integers:
      return static_cast<T>(integer % 1000);
    case kind::denormals:
      return std::ldexp(static_cast<T>(integer % (1 << 20)), limits::min_exponent - limits::digits);
    case kind::negative_zeros:
      return -T(0);
    case kind::huge:
      return scaled(limits::max_exponent - limits::digits - 15);
    case kind::tiny:
      return scaled(limits::min_exponent);
    default:
      return scaled(spread - limits::digits - 3);
  }
}

template <class G>
std::vector<G> numbers(kind of, std::mt19937& random, std::size_t count) {
  std::vector<G> all;
  for (std::size_t i = 0; i < count; ++i) {
    auto number = number_of<computed_type<G>>(of, random);
    if (of == kind::alternating) number = i % 2 == 0 ? std::abs(number) : -std::abs(number);
    if constexpr (lamina::half_element<G>) {
      all.push_back(lamina::saturating_round<G>(number));
      // The denormals of float are zeros of float16, which has its own.
      if (of == kind::denormals) all.back().bits = static_cast<std::uint16_t>(random() & 0x807fU);
    } else {
      all.push_back(number);
    }
  }
  return all;
}

/// The same numbers from `offset` elements behind the start of a cache line.
template <class G>
class placed {
 public:
  placed(std::span<const G> values, std::size_t offset) : memory_(offset + values.size()), offset_(offset) {
    std::ranges::fill_n(memory_.begin(), static_cast<std::ptrdiff_t>(offset), G{});
    std::ranges::copy(values, memory_.begin() + offset);
  }
  std::span<const G> values() const { return std::span(memory_).subspan(offset_); }
  G* data() const { return memory_.data() + offset_; }

 private:
  lamina::detail::buffer<G> memory_;
  std::size_t offset_;
};

/// What mean_abs, l1_norm, l2_norm, max_abs and signed_mean should give, by the literal summation order.
template <class T>
std::array<double, 5> literal_values(const std::vector<T>& values) {
  const std::span<const T> x(values);
  const double n = static_cast<double>(std::max<std::size_t>(x.size(), 1));
  const double sum_abs = literal_sum_abs(x);
  double largest = 0;
  for (const T each : x) largest = std::max(largest, std::abs(static_cast<double>(each)));
  return {sum_abs / n, sum_abs, std::sqrt(literal_sum_squares(x)), largest, literal_sum(x) / n};
}

}  // namespace lamina_test
