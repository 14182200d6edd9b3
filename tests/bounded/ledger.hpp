// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "lamina/layout.hpp"
#include "lamina/residual.hpp"

namespace lamina_test {

/// What one worker has computed, and what of it has been delivered, part by part and literally: with the residual it must add up. T must
/// hold the sums exactly.
template <class T>
class ledger {
 public:
  ledger(const lamina::layout& parts, double momentum) : momentum_(static_cast<T>(momentum)) {
    for (const std::size_t size : parts.sizes()) {
      computed_.emplace_back(size);
      delivered_.emplace_back(size);
      velocity_.emplace_back(size);
    }
  }

  /// The gradients of all layers; with momentum correction what counts are the velocities.
  void compute(const lamina::tiling& cut, const std::vector<std::vector<T>>& gradients) {
    for (std::size_t part = 0; part < computed_.size(); ++part) {
      const T* gradient = gradients[cut.layer_of(part)].data() + cut.begin(part);
      for (std::size_t i = 0; i < computed_[part].size(); ++i) {
        velocity_[part][i] = momentum_ * velocity_[part][i] + gradient[i];
        computed_[part][i] += velocity_[part][i];
      }
    }
  }
  /// Elements of a part from `begin` on, as their receiver has them: zeros where they were lost.
  void deliver(std::size_t part, std::size_t begin, std::span<const T> elements) {
    for (std::size_t i = 0; i < elements.size(); ++i) delivered_[part][begin + i] += elements[i];
  }
  /// Of elements [begin, end), which were delivered, the velocities begin anew.
  void rest(std::size_t part, std::size_t begin, std::size_t end) {
    std::fill_n(velocity_[part].begin() + static_cast<std::ptrdiff_t>(begin), end - begin, T(0));
  }

  bool conserves(const lamina::residual_accumulator<T>& residual) const {
    for (std::size_t part = 0; part < computed_.size(); ++part) {
      for (std::size_t i = 0; i < computed_[part].size(); ++i) {
        if (delivered_[part][i] + residual[part][i] != computed_[part][i]) return false;
      }
    }
    return true;
  }
  const std::vector<T>& delivered(std::size_t part) const { return delivered_[part]; }

 private:
  T momentum_;
  std::vector<std::vector<T>> computed_, delivered_, velocity_;
};

}  // namespace lamina_test
