// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// Where layers are decided on one by one within a budget: which of them find room in a step whatever comes before them.
///
/// A layer that was to go out and did not fit waits. Those that wait find room in the order in which they began to, and as long
/// as the first of them does not fit, the allowance is saved for it: no other layer takes from it. So a layer goes out once the
/// shares of the steps that it waits add up to what waited before it and itself.
class waiting_layers {
 public:
  explicit waiting_layers(std::size_t layers) : since_(layers), has_room_(layers) { order_.reserve(layers); }

  /// `layer` waits from `step` on, or has waited for longer.
  void add(std::size_t layer, std::uint64_t step) {
    if (since_[layer] == 0) since_[layer] = step;
  }
  void remove(std::size_t layer) { since_[layer] = 0; }

  /// Gives out the allowance of a step. Layers of which goes_out(l) says so have room whatever the allowance; those of which
  /// is_gone(l) says so wait no longer. Gives the elements that are left for layers that do not wait.
  template <class GoesOut, class IsGone>
  double give_room(double allowance, std::span<const std::size_t> sizes, const GoesOut& goes_out,
                   const IsGone& is_gone) {
    order_.clear();
    for (std::size_t l = 0; l < sizes.size(); ++l) {
      has_room_[l] = sizes[l] > 0 && goes_out(l) ? 1 : 0;
      if (has_room_[l] != 0) {
        allowance -= static_cast<double>(sizes[l]);
      } else if (since_[l] != 0 && !is_gone(l)) {
        order_.emplace_back(since_[l], l);
      }
    }
    std::sort(order_.begin(), order_.end());
    for (const auto& [since, layer] : order_) {
      const auto elements = static_cast<double>(sizes[layer]);
      if (elements > allowance) return 0;
      has_room_[layer] = 1;
      allowance -= elements;
    }
    return (std::max)(allowance, 0.0);
  }
  /// Of the last give_room().
  [[nodiscard]] bool has_room(std::size_t layer) const { return has_room_[layer] != 0; }

  /// For each layer the step since which it waits, 0: it does not.
  [[nodiscard]] const std::vector<std::uint64_t>& since() const noexcept { return since_; }
  void restore(std::vector<std::uint64_t> since) { since_ = std::move(since); }

 private:
  std::vector<std::uint64_t> since_;
  std::vector<char> has_room_;
  std::vector<std::pair<std::uint64_t, std::size_t>> order_;  // of one call
};

}  // namespace lamina::inline LAMINA_ABI::detail
