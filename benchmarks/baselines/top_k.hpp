// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "method.hpp"
#include "thresholds.hpp"

namespace lamina_baselines {

/// The k elements of each layer that are largest in magnitude, exactly. A message has of each layer a count, then an index and a number for
/// each. It counts as what is smaller, this or a bitmap and the numbers.
/// Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent (EMNLP 2017); Stich et al., Sparsified
/// SGD with Memory (NeurIPS 2018).
class top_k final : public error_feedback {
 public:
  top_k(const lamina::layout& model, double fraction)
      : error_feedback(model), fraction_(checked_fraction(fraction)) {}

  void step(std::span<const float> gradient) override {
    begin_message();
    best_bytes_ = 0;
    entropy_bytes_ = 0;
    for (std::size_t l = 0; l < model().layers(); ++l) {
      const std::span<float> residual = add(l, gradient);
      if (!residual.empty()) select(residual, share_of(residual.size(), fraction_));
      write(static_cast<std::uint32_t>(chosen_.size()));
      auto* to = extend(chosen_.size() * sizeof(pair));
      for (const pair& each : chosen_) {
        std::memcpy(to, &each, sizeof each);
        to += sizeof each;
        residual[each.index] = 0;
      }
      touch(chosen_.size() * (3 * sizeof(pair) + sizeof(float)));
      best_bytes_ +=
          sizeof(std::uint32_t) +
          std::min(chosen_.size() * sizeof(pair), chosen_.size() * sizeof(float) + (residual.size() + 7) / 8);
      entropy_bytes_ += sparse_entropy_bytes(residual.size(), chosen_.size());
      chosen_.clear();
    }
  }

  std::size_t message_bytes() const override { return best_bytes_; }
  double entropy_bytes() const override { return entropy_bytes_; }

  void receive(std::span<float> sum) const override {
    message_reader reader(message());
    for (std::size_t l = 0; l < model().layers(); ++l) {
      const auto count = reader.read<std::uint32_t>();
      float* to = sum.data() + model().offset(l);
      for (std::uint32_t i = 0; i < count; ++i) {
        const auto each = reader.read<pair>();
        to[each.index] += each.value;
      }
    }
  }

 private:
  struct pair {
    std::uint32_t index;
    float value;
  };

  void select(std::span<const float> residual, std::size_t keep) {
    const float threshold = exact_threshold(residual, keep, scratch_);
    const auto largest = std::span(scratch_).first(keep);
    auto ties =
        static_cast<std::size_t>(std::ranges::count(largest, threshold));  // as many as there is room for
    for (std::size_t i = 0; i < residual.size(); ++i) {
      const float magnitude = std::abs(residual[i]);
      if (magnitude < threshold) continue;
      if (magnitude == threshold) {
        if (ties == 0) continue;
        --ties;
      }
      chosen_.push_back({static_cast<std::uint32_t>(i), residual[i]});
    }
    // Magnitudes read and written, the selection, the largest once more for ties, and the residual.
    touch((2 + 4 + 1) * residual.size_bytes() + keep * sizeof(float));
  }

  double fraction_;
  std::vector<pair> chosen_;
  std::vector<float> scratch_;
  std::size_t best_bytes_ = 0;
  double entropy_bytes_ = 0;
};

}  // namespace lamina_baselines
