// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "lamina/residual.hpp"

namespace lamina_fuzz {

/// residual_accumulator as docs/scheme/index.md says it: element by element, every number written, no bounds, no blocks.
template <class T>
class literal_residual {
 public:
  literal_residual(std::span<const std::size_t> sizes, T momentum, lamina::non_finite check)
      : momentum_(momentum), check_(check) {
    for (const std::size_t size : sizes) {
      elements_.emplace_back(size);
      velocity_.emplace_back(size);
      has_decayed_.push_back(false);
    }
  }

  const std::vector<T>& operator[](std::size_t layer) const { return elements_[layer]; }
  std::size_t left_out() const { return left_out_; }

  /// Whether a gradient is added, in parts or in full.
  bool takes(std::size_t layer, std::span<const T> gradient) const {
    if (check_ == lamina::non_finite::skip) return true;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const sums after = sums_after(layer, i, gradient[i]);
      if (!std::isfinite(after.element) || !std::isfinite(after.velocity)) return false;
    }
    return true;
  }

  void add(std::size_t layer, std::span<const T> gradient) {
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const sums after = sums_after(layer, i, gradient[i]);
      if (!std::isfinite(after.element) || !std::isfinite(after.velocity)) {
        ++left_out_;
        continue;
      }
      elements_[layer][i] = after.element;
      velocity_[layer][i] = after.velocity;
    }
    has_decayed_[layer] = true;
  }

  /// The next gradient of each layer is the first of its step.
  void begin_step() { has_decayed_.assign(has_decayed_.size(), false); }

  /// What was sent, and whether it was all there was.
  void take_out(std::size_t layer, std::span<const T> sent, bool is_all) {
    for (std::size_t i = 0; i < sent.size(); ++i) {
      elements_[layer][i] = is_all ? T(0) : elements_[layer][i] - sent[i];
      velocity_[layer][i] = 0;
    }
  }

 private:
  struct sums {
    T element;
    T velocity;
  };

  sums sums_after(std::size_t layer, std::size_t i, T gradient) const {
    const T before = elements_[layer][i];
    if (momentum_ == 0) return {before + gradient, 0};
    if (has_decayed_[layer]) return {before + gradient, velocity_[layer][i] + gradient};
    const volatile T product = momentum_ * velocity_[layer][i];  // no contraction to FMA
    const T velocity = product + gradient;
    return {before + velocity, velocity};
  }

  T momentum_;
  lamina::non_finite check_;
  std::vector<std::vector<T>> elements_;
  std::vector<std::vector<T>> velocity_;
  std::vector<bool> has_decayed_;  // in this step
  std::size_t left_out_ = 0;
};

}  // namespace lamina_fuzz
