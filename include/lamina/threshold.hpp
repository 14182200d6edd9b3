// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"

/// The threshold λ: Algorithm 1 of the paper. Read representative.hpp before.
namespace lamina::inline LAMINA_ABI {

/// What Algorithm 1 gives when the sum of the sizes never exceeds R·N: every layer is sent.
inline constexpr double invalid_threshold = -1.0;

/// Throws std::invalid_argument unless 0 <= drop_ratio <= 1.
inline void check_drop_ratio(double drop_ratio) {
  if (detail::is_nan(drop_ratio) || !(drop_ratio >= 0.0 && drop_ratio <= 1.0))
    detail::refuse("drop ratio must lie in [0, 1], got ", drop_ratio);
}

/// Algorithm 1, and its counterpart for a budget, with the working memory kept between calls: it allocates only when L grows.
class threshold_search {
 public:
  /// As search_threshold below.
  [[nodiscard]] double operator()(std::span<const double> representative_values,
                                  std::span<const std::size_t> layer_sizes, double drop_ratio) {
    check_drop_ratio(drop_ratio);
    if (representative_values.size() != layer_sizes.size()) {
      detail::refuse("threshold search: ", representative_values.size(), " values but ", layer_sizes.size(),
                     " layer sizes");
    }
    std::size_t elements = 0;
    begin();
    for (std::size_t l = 0; l < layer_sizes.size(); ++l) {
      if (detail::is_nan(representative_values[l]))
        detail::refuse("threshold search: the value of layer ", l, " is NaN");
      if (layer_sizes[l] > (std::numeric_limits<std::size_t>::max)() - elements)
        detail::refuse("threshold search: the sum of the layer sizes overflows");
      elements += layer_sizes[l];
      if (layer_sizes[l] > 0) add(representative_values[l], layer_sizes[l]);
    }
    return beyond(drop_ratio * static_cast<double>(elements));
  }

  /// Room for so many layers, so that a search allocates nothing.
  void reserve(std::size_t layers) { entries_.reserve(layers); }

  /// The same over layers that are given one by one: begin(), add() each that is not empty, then beyond() or within(), once.
  void begin() { entries_.clear(); }
  /// `value` is not NaN: see detail::ordered_value. Of the two zeros it is +0, so that a threshold is bitwise identical everywhere.
  void add(double value, std::size_t elements) { entries_.push_back({value == 0 ? 0.0 : value, elements}); }
  /// The value of the layer with which, from the smallest value on, the elements are more than `limit_elements`.
  [[nodiscard]] double beyond(double limit_elements) {
    return first_beyond<false>(limit_elements).value_or(invalid_threshold);
  }
  struct budget_result {
    double threshold;
    /// The largest value below it: of the layers that have it some do not fit.
    std::optional<double> crossing;
    double left = 0;  ///< elements that those layers may have
  };
  /// The smallest threshold at which the layers sent hold at most `most_elements`, largest values first: those of equal value are within it
  /// together or not at all. Infinity if not even the layer with the largest value fits.
  [[nodiscard]] budget_result within(double most_elements) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const std::optional<double> crossing = first_beyond<true>(most_elements);
    if (!crossing) return {-infinity, std::nullopt};
    // The layers before it, in descending order, fit; those tied with it do not all.
    double smallest = infinity;
    std::size_t elements = 0;
    for (const entry& each : entries_) {
      if (!(each.value > *crossing)) continue;
      smallest = (std::min)(smallest, each.value);
      elements += each.elements;
    }
    return {smallest, crossing, most_elements - static_cast<double>(elements)};
  }

 private:
  struct entry {
    double value;
    std::size_t elements;
  };

  // The value with which, in ascending or descending order, the sum of the sizes is greater than the limit. The paper sorts all layers.
  // Only one value is wanted, so this narrows the range that holds it as a quickselect does, by weight: one pass divides the range at a
  // pivot and adds up what stands before it. Ties share one value, hence their order does not matter, nor does the choice of pivots.
  template <bool Descending>
  std::optional<double> first_beyond(double limit_elements) {
    std::size_t before = 0;  // elements of the layers that are known to stand before it
    entry* first = entries_.data();
    entry* last = first + entries_.size();
    std::uint64_t random = 0;
    while (first != last) {
      const double pivot = pivot_of(first, static_cast<std::size_t>(last - first), random);
      std::size_t elements = 0;
      entry* const middle = std::partition(first, last, [&](const entry& each) {
        const bool is_before = Descending ? pivot < each.value : each.value < pivot;
        elements += is_before ? each.elements : 0;
        return is_before;
      });
      if (static_cast<double>(before + elements) > limit_elements) {
        last = middle;
        continue;
      }
      before += elements;
      elements = 0;
      entry* const behind = std::partition(middle, last, [&](const entry& each) {
        const bool is_tied = !(Descending ? each.value < pivot : pivot < each.value);
        elements += is_tied ? each.elements : 0;
        return is_tied;
      });
      if (static_cast<double>(before + elements) > limit_elements) return pivot;
      before += elements;
      first = behind;
    }
    return std::nullopt;
  }

  // The median of the values at three places, which no order of the layers makes a bad choice throughout.
  static double pivot_of(const entry* first, std::size_t count, std::uint64_t& random) {
    const auto any_value = [&] {
      random = random * 6364136223846793005U + 1442695040888963407U;  // Knuth's
      return first[(random >> 33U) % count].value;
    };
    const double a = any_value();
    const double b = any_value();
    const double c = any_value();
    return (std::max)((std::min)(a, b), (std::min)((std::max)(a, b), c));
  }

  std::vector<entry> entries_;
};

/// Algorithm 1: order the L layers by value, add up their sizes from the smallest value on until the sum is greater than R·N; that layer's
/// value is the threshold. Layers below it then hold at most R·N elements, and less than that by fewer than are tied at the threshold.
///
/// \param representative_values, layer_sizes  q_l, and n_l in elements, L each
/// \param drop_ratio                          R in [0, 1], the share of the elements to drop
/// \return the threshold, or invalid_threshold if the sum never exceeds R·N (only when R = 1 or N = 0)
/// \throws std::invalid_argument  the two differ in length, a value is NaN, R is outside [0, 1], N overflows
///
/// Cost: O(L) on average and one allocation; threshold_search keeps it. Deterministic.
/// Source: Lee et al. 2020, Algorithm 1; ascending, since descending would send more than R.
[[nodiscard]] inline double search_threshold(std::span<const double> representative_values,
                                             std::span<const std::size_t> layer_sizes, double drop_ratio) {
  return threshold_search{}(representative_values, layer_sizes, drop_ratio);
}

}  // namespace lamina::inline LAMINA_ABI
