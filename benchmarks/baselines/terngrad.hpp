// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "method.hpp"

namespace lamina_baselines {

/// Each element as -s, 0 or s, two bits, s being the largest magnitude of its layer: s with a probability of |g| / s, so
/// that the mean is the gradient. Keeps no residual. Layers are first clipped at 2.5 standard deviations.
/// Source: Wen et al., TernGrad (NeurIPS 2017).
class terngrad final : public method {
 public:
  /// `clip_deviations`: infinity for no clipping.
  explicit terngrad(const lamina::layout& model, double clip_deviations = 2.5, std::uint32_t seed = 1)
      : model_(model), clip_deviations_(clip_deviations), random_(seed) {}

  void step(std::span<const float> gradient) override {
    message_.clear();
    touched_ = 0;
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      quantize(gradient.subspan(model_.offset(l), model_.sizes()[l]));
    }
  }
  std::size_t message_bytes() const override { return message_.size(); }
  std::size_t bytes_touched() const override { return touched_; }

  void receive(std::span<float> sum) const override {
    message_reader reader(message_);
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      const auto scale = reader.read<float>();
      const float values[4] = {0, scale, -scale, 0};
      const std::size_t count = model_.sizes()[l];
      const std::byte* codes = reader.take((count + 3) / 4);
      float* to = sum.data() + model_.offset(l);
      for (std::size_t i = 0; i < count; ++i) {
        to[i] += values[std::to_integer<unsigned>(codes[i / 4] >> (2 * (i % 4))) & 3U];
      }
    }
  }

 private:
  void quantize(std::span<const float> layer) {
    double squares = 0;
    double sum = 0;
    float largest = 0;
#pragma omp simd reduction(+ : squares, sum) reduction(max : largest)
    for (std::size_t i = 0; i < layer.size(); ++i) {
      sum += layer[i];
      squares += static_cast<double>(layer[i]) * layer[i];
      largest = std::max(largest, std::abs(layer[i]));
    }
    const double count = static_cast<double>(std::max<std::size_t>(layer.size(), 1));
    const double deviation = std::sqrt(std::max(0.0, squares / count - sum / count * (sum / count)));
    const double clip = clip_deviations_ * deviation;
    const float scale = deviation > 0 && clip < largest ? static_cast<float>(clip) : largest;

    const std::size_t begin = message_.size();
    message_.resize(begin + sizeof scale + (layer.size() + 3) / 4);
    std::memcpy(message_.data() + begin, &scale, sizeof scale);
    std::byte* codes = message_.data() + begin + sizeof scale;
    for (std::size_t i = 0; i < layer.size(); i += 4) {
      unsigned byte = 0;
      for (std::size_t k = 0; k < std::min<std::size_t>(4, layer.size() - i); ++k) {
        const float each = layer[i + k];
        const bool is_sent = std::abs(each) > uniform() * scale;
        const unsigned code = is_sent ? (each < 0 ? 2U : 1U) : 0U;
        byte |= code << (2 * k);
      }
      codes[i / 4] = static_cast<std::byte>(byte);
    }
    touched_ += 2 * layer.size_bytes() + layer.size() / 4;
  }

  // In [0, 1), 24 bits of a xorshift32 (Marsaglia 2003): quick, and random enough for this.
  float uniform() {
    random_ ^= random_ << 13U;
    random_ ^= random_ >> 17U;
    random_ ^= random_ << 5U;
    return static_cast<float>(random_ >> 8U) / 16777216.0F;
  }

  lamina::layout model_;
  double clip_deviations_;
  std::uint32_t random_;
  std::vector<std::byte> message_;
  std::size_t touched_ = 0;
};

}  // namespace lamina_baselines
