// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "lamina/layout.hpp"
#include "lamina/residual.hpp"

namespace lamina_test {

/// What one worker has computed, and what of it has been delivered, fragment by fragment and literally: with the residual it must add up.
/// T must hold the sums exactly.
template <class T>
class ledger {
 public:
  ledger(const lamina::layout& fragments, double momentum) : momentum_(static_cast<T>(momentum)) {
    for (const std::size_t size : fragments.sizes()) {
      computed_.emplace_back(size);
      delivered_.emplace_back(size);
      velocity_.emplace_back(size);
    }
  }

  /// The gradients of all layers; with momentum correction what counts are the velocities.
  void compute(const lamina::tiling& cut, const std::vector<std::vector<T>>& gradients) {
    for (std::size_t fragment = 0; fragment < computed_.size(); ++fragment) {
      const T* gradient = gradients[cut.layer_of(fragment)].data() + cut.begin(fragment);
      for (std::size_t i = 0; i < computed_[fragment].size(); ++i) {
        velocity_[fragment][i] = momentum_ * velocity_[fragment][i] + gradient[i];
        computed_[fragment][i] += velocity_[fragment][i];
      }
    }
  }
  /// Elements of a fragment from `begin` on, as their receiver has them: zeros where they were lost.
  void deliver(std::size_t fragment, std::size_t begin, std::span<const T> elements) {
    for (std::size_t i = 0; i < elements.size(); ++i) delivered_[fragment][begin + i] += elements[i];
  }
  /// Of elements [begin, end), which were delivered, the velocities begin anew.
  void rest(std::size_t fragment, std::size_t begin, std::size_t end) {
    std::fill_n(velocity_[fragment].begin() + static_cast<std::ptrdiff_t>(begin), end - begin, T(0));
  }

  bool conserves(const lamina::residual_accumulator<T>& residual) const {
    for (std::size_t fragment = 0; fragment < computed_.size(); ++fragment) {
      for (std::size_t i = 0; i < computed_[fragment].size(); ++i) {
        if (delivered_[fragment][i] + residual[fragment][i] != computed_[fragment][i]) return false;
      }
    }
    return true;
  }
  const std::vector<T>& delivered(std::size_t fragment) const { return delivered_[fragment]; }

 private:
  T momentum_;
  std::vector<std::vector<T>> computed_, delivered_, velocity_;
};

}  // namespace lamina_test
