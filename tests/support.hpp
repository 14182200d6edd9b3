// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lamina/layout.hpp"
#include "signed_mean.hpp"

/// What several tests share: random models and gradients, and references that are written as literally as
/// docs/algorithm.md and representative.hpp say it.
namespace lamina_test {

/// A random number in [0, limit), the same on every platform (unlike the distributions of <random>).
inline std::size_t below(std::mt19937& random, std::size_t limit) {
  return random() % limit;
}

/// A model with layers "layer0", "layer1", ... of these sizes.
inline lamina::layout model_of(const std::vector<std::size_t>& sizes) {
  std::vector<lamina::layer> layers;
  for (const std::size_t size : sizes) layers.push_back({"layer" + std::to_string(layers.size()), {size}});
  return lamina::layout(std::move(layers));
}

/// Integers in [-magnitude, magnitude].
template <class T>
std::vector<T> random_integers(std::mt19937& random, std::size_t count, std::size_t magnitude = 8) {
  std::vector<T> values(count);
  for (T& value : values) {
    value = static_cast<T>(below(random, 2 * magnitude + 1)) - static_cast<T>(magnitude);
  }
  return values;
}

/// Fractions of both signs over some orders of magnitude, so that sums round.
template <class T>
std::vector<T> random_fractions(std::mt19937& random, std::size_t count) {
  std::vector<T> values(count);
  for (T& value : values) {
    const T mantissa = static_cast<T>(random()) / T(4294967296.0) + T(random()) * T(1e-19);
    value = (random() % 2 == 0 ? mantissa : -mantissa) * std::array{T(1e-3), T(1), T(37)}[random() % 3];
  }
  return values;
}

template <class A, class B>
bool same_bits(const A& a, const B& b) {
  const auto left = std::as_bytes(std::span(a));
  const auto right = std::as_bytes(std::span(b));
  return left.size() == right.size() &&
         (left.empty() || std::memcmp(left.data(), right.data(), left.size()) == 0);
}

inline bool same_bits(double a, double b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

/// Whether `call` throws an `Exception` or one derived from it; others pass through.
template <class Exception, class Call>
bool throws(const Call& call) {
  try {
    call();
  } catch (const Exception&) {
    return true;
  }
  return false;
}

/// what() of the exception that `call` throws, if it is an `Exception` or derived from it; otherwise a text
/// that says so.
template <class Exception, class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what();
  } catch (...) {
    return "(another exception)";
  }
  return "(no exception)";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Algorithm 1 as written: stable-sort ascending, add up until the sum is greater than R·N.
inline double literal_algorithm_1(const std::vector<double>& values, const std::vector<std::size_t>& sizes,
                                  double drop_ratio) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t l) { return values[l]; });
  const std::size_t all = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
  const double limit = drop_ratio * static_cast<double>(all);
  std::size_t sum = 0;
  for (const std::size_t l : order) {
    sum += sizes[l];
    if (static_cast<double>(sum) > limit) return values[l];
  }
  return -1;
}

/// The order of the totals of blocks in representative.hpp, one level after the other.
template <class Combine>
double literal_total_of_totals(std::vector<double> totals, Combine combine) {
  do {
    std::vector<double> runs;
    for (std::size_t i = 0; i < totals.size(); ++i) {
      if (i % 64 == 0) runs.push_back(0);
      runs.back() = combine(runs.back(), totals[i]);
    }
    totals = runs;
  } while (totals.size() > 1);
  return totals.empty() ? 0 : totals[0];
}

/// What it combines gives other bits in another order, and with one zero more.
struct tells_order {
  LAMINA_HOST_DEVICE static double map(double x) { return x; }
  LAMINA_HOST_DEVICE static double combine(double a, double b) {
    const std::uint64_t mixed =
        ((std::bit_cast<std::uint64_t>(a) * 0x9e3779b97f4a7c15) ^ std::bit_cast<std::uint64_t>(b)) *
        0xbf58476d1ce4e5b9;
    return static_cast<double>(mixed >> 11U);  // exact
  }
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t) { return total; }
};

/// How many totals there may be: none, up to some runs, and around what completes a run of a higher level. Ascending.
inline std::vector<std::size_t> telling_counts_of_totals() {
  std::vector<std::size_t> counts(200);
  std::iota(counts.begin(), counts.end(), std::size_t{0});
  for (const std::size_t around : {64 * 64, 64 * 65, 2 * 64 * 64, 64 * 64 * 64, 64 * 64 * 65, 64 * 65 * 65}) {
    counts.insert(counts.end(), {around - 1, around, around + 1});
  }
  return counts;
}

/// The summation order of representative.hpp, one element after the other.
template <class T, class Map, class Combine>
double literal_total(std::span<const T> elements, Map map, Combine combine) {
  using lane_type = decltype(map(T{}));
  std::vector<double> totals;
  for (std::size_t begin = 0; begin < elements.size(); begin += 4096) {
    std::array<lane_type, 64> lane{};
    const std::size_t end = std::min(elements.size(), begin + 4096);
    for (std::size_t i = begin; i < end; ++i) {
      const volatile lane_type mapped = map(elements[i]);  // no contraction to FMA
      lane[(i - begin) % 64] = combine(lane[(i - begin) % 64], lane_type(mapped));
    }
    for (std::size_t h = 32; h > 0; h /= 2) {
      for (std::size_t j = 0; j < h; ++j) lane[j] = combine(lane[j], lane[j + h]);
    }
    totals.push_back(static_cast<double>(lane[0]));
  }
  return literal_total_of_totals(std::move(totals), combine);
}

template <class T>
double literal_sum_abs(std::span<const T> elements) {
  return literal_total(
      elements, [](T x) { return x < 0 ? -x : x; }, [](auto a, auto b) { return a + b; });
}
template <class T>
double literal_sum(std::span<const T> elements) {
  return literal_total(
      elements, [](T x) { return x; }, [](auto a, auto b) { return a + b; });
}
template <class T>
double literal_sum_squares(std::span<const T> elements) {
  return literal_total(
      elements, [](T x) { return double(x) * double(x); }, [](auto a, auto b) { return a + b; });
}
template <class T>
double literal_mean_abs(std::span<const T> elements) {
  return elements.empty() ? 0 : literal_sum_abs(elements) / static_cast<double>(elements.size());
}

}  // namespace lamina_test
