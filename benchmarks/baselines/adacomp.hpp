// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "method.hpp"

namespace lamina_baselines {

/// Of each bin of a layer the elements that, with this step's gradient added once more, reach the largest residual of the
/// bin; as a sign and the mean of the bins' largest. Decides itself how much it sends. Bins hold 50 elements in
/// convolutions, where an element takes a byte, and 500 in other layers, where it takes two.
/// Source: Chen et al., AdaComp: Adaptive Residual Gradient Compression (AAAI 2018).
class adacomp final : public error_feedback {
 public:
  explicit adacomp(const lamina::layout& model) : error_feedback(model) {}

  void step(std::span<const float> gradient) override {
    begin_message();
    for (std::size_t l = 0; l < model().layers(); ++l) {
      const std::span<float> residual = add(l, gradient);
      const std::span<const float> fresh = gradient.subspan(model().offset(l), residual.size());
      is_convolution(l) ? compress<std::uint8_t>(residual, fresh) : compress<std::uint16_t>(residual, fresh);
    }
  }

  void receive(std::span<float> sum) const override {
    message_reader reader(message());
    for (std::size_t l = 0; l < model().layers(); ++l) {
      const std::span<float> to = sum.subspan(model().offset(l), model().sizes()[l]);
      is_convolution(l) ? add_from<std::uint8_t>(reader, to) : add_from<std::uint16_t>(reader, to);
    }
  }

  template <class Entry>
  static constexpr std::size_t bin_elements = sizeof(Entry) == 1 ? 50 : 500;

 private:
  bool is_convolution(std::size_t layer) const { return model()[layer].shape.size() == 4; }

  // Message: the scale; for each bin the number of its entries, and each as its place in the bin and its sign.
  template <class Entry>
  void compress(std::span<float> residual, std::span<const float> fresh) {
    constexpr std::size_t bin = bin_elements<Entry>;
    largest_.clear();
    double sum = 0;
    for (std::size_t begin = 0; begin < residual.size(); begin += bin) {
      float largest = 0;
      const std::size_t end = std::min(begin + bin, residual.size());
#pragma omp simd reduction(max : largest)
      for (std::size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(residual[i]));
      largest_.push_back(largest);
      sum += largest;
    }
    const auto scale =
        largest_.empty() ? 0.0F : static_cast<float>(sum / static_cast<double>(largest_.size()));
    write(scale);
    std::size_t sent = 0;
    for (std::size_t begin = 0; begin < residual.size(); begin += bin) {
      const float largest = largest_[begin / bin];
      entries_.assign(1, 0);
      for (std::size_t i = begin; largest > 0 && i < std::min(begin + bin, residual.size()); ++i) {
        if (std::abs(residual[i] + fresh[i]) < largest) continue;
        const bool is_negative = residual[i] < 0;
        entries_.push_back(static_cast<std::uint16_t>(2 * (i - begin) + (is_negative ? 1 : 0)));
        residual[i] -= is_negative ? -scale : scale;
      }
      entries_[0] = static_cast<std::uint16_t>(entries_.size() - 1);
      for (const std::uint16_t each : entries_) write(static_cast<Entry>(each));
      sent += entries_.size();
    }
    touch(3 * residual.size_bytes() + sent * (2 * sizeof(std::uint16_t) + sizeof(Entry)));
  }

  template <class Entry>
  static void add_from(message_reader& reader, std::span<float> sum) {
    const auto scale = reader.read<float>();
    for (std::size_t begin = 0; begin < sum.size(); begin += bin_elements<Entry>) {
      for (auto count = reader.read<Entry>(); count > 0; --count) {
        const auto entry = reader.read<Entry>();
        sum[begin + entry / 2] += entry % 2 == 1 ? -scale : scale;
      }
    }
  }

  std::vector<float> largest_;
  std::vector<std::uint16_t> entries_;
};

}  // namespace lamina_baselines
