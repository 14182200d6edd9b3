// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>

#include "lamina/residual.hpp"
#include "support.hpp"

namespace lamina_fuzz {

/// residual_accumulator as docs/algorithm.md defines it: element by element, every number written, no bounds, no blocks.
template <class T>
class literal_residual {
 public:
  literal_residual(std::span<const std::size_t> sizes, T momentum, lamina::non_finite check)
      : momentum_(momentum), check_(check) {
    for (const std::size_t size : sizes) {
      elements_.emplace_back(size);
      velocity_.emplace_back(size);
      has_decayed_.push_back(false);
      means_.emplace_back(size / block + 1);
    }
  }

  const std::vector<T>& operator[](std::size_t layer) const { return elements_[layer]; }
  const std::vector<T>& velocity(std::size_t layer) const { return velocity_[layer]; }
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
    for (std::size_t b = 0; b < means_[layer].size(); ++b) {
      const std::size_t end = std::min(elements_[layer].size(), (b + 1) * block);
      double total = 0;
      for (std::size_t i = b * block; i < end; ++i)
        total += std::abs(static_cast<double>(elements_[layer][i]));
      means_[layer][b] = total / static_cast<double>(end - b * block);
    }
  }

  /// After a gradient was refused: takes over what it has left, and tells whether that is as near as non_finite::refuse promises.
  bool settle(std::size_t layer, std::span<const T> elements, std::span<const T> velocity) {
    constexpr double epsilon = std::numeric_limits<T>::epsilon();
    bool is_near = true;
    for (std::size_t i = 0; i < elements.size(); ++i) {
      const double most = 2048 * epsilon * (1 + 1e-4) * means_[layer][i / block] +
                          4 * static_cast<double>(std::numeric_limits<T>::denorm_min());
      const auto distance = [](T a, T b) {
        return std::abs(static_cast<double>(a) - static_cast<double>(b));
      };
      is_near &= distance(elements[i], elements_[layer][i]) <= most;
      elements_[layer][i] = elements[i];
      if (velocity.empty()) continue;
      const double before = velocity_[layer][i];
      const double factor = has_decayed_[layer] ? 1 : static_cast<double>(momentum_);
      is_near &= factor * distance(velocity[i], velocity_[layer][i]) <=
                 most + 2 * epsilon * std::abs(factor * before);
      velocity_[layer][i] = velocity[i];
    }
    return is_near;
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

  static constexpr std::size_t block = 4096;

  T momentum_;
  lamina::non_finite check_;
  std::vector<std::vector<T>> elements_;
  std::vector<std::vector<T>> velocity_;
  std::vector<bool> has_decayed_;           // in this step
  std::vector<std::vector<double>> means_;  // of the magnitudes of each block, after the last gradient
  std::size_t left_out_ = 0;
};

}  // namespace lamina_fuzz
