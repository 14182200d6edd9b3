// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "method.hpp"

namespace lamina_baselines {

/// Every element as an 8-bit float of 4 bits of exponent and 3 of mantissa, over a scale of its layer that makes the largest 448, with
/// error feedback. Source: Micikevicius et al., FP8 Formats for Deep Learning (2022), E4M3.
class fp8 final : public error_feedback {
 public:
  explicit fp8(const lamina::layout& model) : error_feedback(model) {}

  void step(std::span<const float> gradient) override {
    begin_message();
    for (std::size_t l = 0; l < model().layers(); ++l) {
      const std::span<float> residual = add(l, gradient);
      float largest = 0;
#pragma omp simd reduction(max : largest)
      for (std::size_t i = 0; i < residual.size(); ++i) largest = std::max(largest, std::abs(residual[i]));
      const float scale = largest > 0 ? largest / 448 : 1;
      write(scale);
      const float inverse = 1 / scale;
      auto* to = reinterpret_cast<std::uint8_t*>(extend(residual.size()));
      for (std::size_t i = 0; i < residual.size(); ++i) to[i] = code_of(residual[i] * inverse);
      for (std::size_t i = 0; i < residual.size(); ++i) residual[i] -= scale * value_of(to[i]);
      touch(3 * residual.size_bytes() + 2 * residual.size());
    }
  }

  void receive(std::span<float> sum) const override {
    message_reader reader(message());
    for (std::size_t l = 0; l < model().layers(); ++l) {
      const auto scale = reader.read<float>();
      const std::byte* from = reader.take(model().sizes()[l]);
      float* to = sum.data() + model().offset(l);
      for (std::size_t i = 0; i < model().sizes()[l]; ++i)
        to[i] += scale * value_of(static_cast<std::uint8_t>(from[i]));
    }
  }

  /// The nearest, ties to even; of a magnitude up to 448, a little more is cut.
  static std::uint8_t code_of(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t magnitude = bits & 0x7fffffffU;
    const std::uint32_t normal = ((magnitude + 0x7ffffU + (magnitude >> 20U & 1U)) >> 20U) - (120U << 3U);
    // Below 2^-6 steps are of 2^-9: the sum with 2^14 has just these bits.
    const auto small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 16384.0F) & 0xfU;
    const std::uint32_t code = magnitude < (121U << 23U) ? small : std::min(normal, 0x7eU);
    return static_cast<std::uint8_t>(code | ((bits >> 24U) & 0x80U));
  }
  static float value_of(std::uint8_t code) {
    const std::uint32_t exponent = code >> 3U & 0xfU;
    const std::uint32_t mantissa = code & 7U;
    const float magnitude = exponent == 0 ? static_cast<float>(mantissa) / 512
                                          : std::bit_cast<float>((exponent + 120U) << 23U | mantissa << 20U);
    return (code & 0x80U) != 0 ? -magnitude : magnitude;
  }
};

}  // namespace lamina_baselines
