// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/detail/finite.hpp"

/// The threshold λ: Algorithm 1 of the paper, and when to search it again.
namespace lamina {

/// What Algorithm 1 gives when the sum of the sizes never exceeds R·N: every layer is sent.
inline constexpr double invalid_threshold = -1.0;

/// Throws std::invalid_argument unless 0 <= drop_ratio <= 1.
inline void check_drop_ratio(double drop_ratio) {
  if (detail::is_nan(drop_ratio) || !(drop_ratio >= 0.0 && drop_ratio <= 1.0)) {
    throw std::invalid_argument("drop ratio must lie in [0, 1], got " + std::to_string(drop_ratio));
  }
}

/// Algorithm 1, and its counterpart for a budget, with the working memory kept between calls, so that it allocates only
/// when L grows.
class threshold_search {
 public:
  /// As search_threshold below.
  double operator()(std::span<const double> representative_values, std::span<const std::size_t> layer_sizes,
                    double drop_ratio) {
    check_drop_ratio(drop_ratio);
    const std::size_t elements = gather(representative_values, layer_sizes);
    const double limit = drop_ratio * static_cast<double>(elements);
    const auto crossing =
        first_beyond(limit, [](const entry& a, const entry& b) { return a.value < b.value; });
    return crossing == entries_.end() ? invalid_threshold : crossing->value;
  }

  /// The smallest threshold at which the layers sent hold at most `most_elements`: as much as a budget allows, largest
  /// values first. Layers that are tied are sent together or not at all. Infinity if not even the layer with the largest
  /// value fits. Errors and cost as search_threshold.
  double within_budget(std::span<const double> representative_values,
                       std::span<const std::size_t> layer_sizes, double most_elements) {
    gather(representative_values, layer_sizes);
    const auto crossing =
        first_beyond(most_elements, [](const entry& a, const entry& b) { return a.value > b.value; });
    if (crossing == entries_.end()) return -std::numeric_limits<double>::infinity();
    // The layers before it, in descending order, fit; those tied with it do not all.
    double smallest = std::numeric_limits<double>::infinity();
    for (const entry& each : entries_) {
      if (each.value > crossing->value) smallest = std::min(smallest, each.value);
    }
    return smallest;
  }

 private:
  struct entry {
    double value;
    std::size_t elements;
  };

  // Fills entries_ with the layers that are not empty; returns N.
  std::size_t gather(std::span<const double> values, std::span<const std::size_t> sizes) {
    if (values.size() != sizes.size()) {
      throw std::invalid_argument("threshold search: " + std::to_string(values.size()) + " values but " +
                                  std::to_string(sizes.size()) + " layer sizes");
    }
    std::size_t elements = 0;
    entries_.clear();
    for (std::size_t l = 0; l < sizes.size(); ++l) {
      if (detail::is_nan(values[l])) {
        throw std::invalid_argument("threshold search: the value of layer " + std::to_string(l) + " is NaN");
      }
      if (sizes[l] > std::numeric_limits<std::size_t>::max() - elements) {
        throw std::invalid_argument("threshold search: the sum of the layer sizes overflows");
      }
      elements += sizes[l];
      if (sizes[l] > 0) entries_.push_back({values[l], sizes[l]});
    }
    return elements;
  }

  // The first layer in `order` with which the sum of the sizes is greater than the limit. The paper sorts all layers.
  // Only one value is wanted, so this narrows the range that holds it as a quickselect does: linear in L on average.
  // Ties share one value, hence their order does not matter.
  template <class Order>
  std::vector<entry>::iterator first_beyond(double limit_elements, const Order& order) {
    std::size_t before = 0;  // elements of the layers that are known to stand before it
    auto first = entries_.begin();
    auto last = entries_.end();
    while (last - first > 1) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, order);
      std::size_t lower_half = before;
      for (auto it = first; it != middle; ++it) lower_half += it->elements;
      if (static_cast<double>(lower_half) > limit_elements) {
        last = middle;
      } else {
        before = lower_half;
        first = middle;
      }
    }
    const bool crosses = first != last && static_cast<double>(before + first->elements) > limit_elements;
    return crosses ? first : entries_.end();
  }

  std::vector<entry> entries_;
};

/// Algorithm 1: order the L layers by value, add up their sizes from the smallest value on until the sum is
/// greater than R·N; that layer's value is the threshold. Layers below the threshold then hold at most R·N
/// elements, and less than that by fewer elements than are tied at the threshold.
///
/// \param representative_values  q_l, L values
/// \param layer_sizes            n_l in elements, L sizes
/// \param drop_ratio             R in [0, 1], the share of the elements to hold back
/// \return the threshold, or invalid_threshold if the sum never exceeds R·N (only when R = 1 or N = 0)
/// \throws std::invalid_argument  the two differ in length, a value is NaN, R is outside [0, 1], N overflows
///
/// Cost: O(L) on average and one allocation; threshold_search keeps it. Deterministic.
/// Source: Lee et al. 2020, Algorithm 1; ascending, since descending would send more than R.
inline double search_threshold(std::span<const double> representative_values,
                               std::span<const std::size_t> layer_sizes, double drop_ratio) {
  return threshold_search{}(representative_values, layer_sizes, drop_ratio);
}

/// When the threshold is searched again.
class refresh_schedule {
 public:
  /// Every `steps` steps, beginning with the first; 1 is the default of the library, 100 is what the paper does.
  /// Throws std::invalid_argument for 0.
  static refresh_schedule every(std::uint64_t steps) {
    if (steps == 0) throw std::invalid_argument("the refresh period must be at least one step");
    return refresh_schedule(steps, std::nullopt);
  }
  /// In the first step alone.
  static refresh_schedule first_step_only() { return refresh_schedule(0, std::nullopt); }
  /// Never: `threshold` is used throughout. Throws std::invalid_argument for NaN.
  static refresh_schedule fixed(double threshold) {
    if (detail::is_nan(threshold)) throw std::invalid_argument("the threshold must not be NaN");
    return refresh_schedule(0, threshold);
  }

  /// Whether a search is due in `step`, counted from 1.
  constexpr bool due(std::uint64_t step) const noexcept {
    if (fixed_threshold_) return false;
    return period_ == 0 ? step == 1 : (step - 1) % period_ == 0;
  }
  /// The threshold of fixed(), if this is one.
  constexpr std::optional<double> fixed_threshold() const noexcept { return fixed_threshold_; }

 private:
  refresh_schedule(std::uint64_t period, std::optional<double> fixed_threshold)
      : period_(period), fixed_threshold_(fixed_threshold) {}

  std::uint64_t period_;  // 0: the first step alone
  std::optional<double> fixed_threshold_;
};

}  // namespace lamina
