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
      float* from = residual.data();
      // In one pass, with the code's value at hand.
#pragma omp simd
      for (std::size_t i = 0; i < residual.size(); ++i) {
        const std::uint32_t code = code_of(from[i] * inverse);
        to[i] = static_cast<std::uint8_t>(code);
        from[i] -= scale * value_of(code);
      }
      touch(3 * residual.size_bytes() + residual.size());
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
  static std::uint32_t code_of(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t magnitude = bits & 0x7fffffffU;
    const std::uint32_t normal = ((magnitude + 0x7ffffU + (magnitude >> 20U & 1U)) >> 20U) - (120U << 3U);
    // Below 2^-6 steps are of 2^-9: the sum with 2^14 has just these bits.
    const auto small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 16384.0F) & 0xfU;
    const std::uint32_t cut = normal < 0x7eU ? normal : 0x7eU;
    const std::uint32_t code = chosen(magnitude < (121U << 23U), small, cut);
    return code | ((bits >> 24U) & 0x80U);
  }
  static float value_of(std::uint32_t code) {
    const std::uint32_t exponent = code >> 3U & 0xfU;
    const std::uint32_t mantissa = code & 7U;
    const auto small = std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<int>(mantissa)) / 512);
    const std::uint32_t normal = (exponent + 120U) << 23U | mantissa << 20U;
    return std::bit_cast<float>(chosen(exponent == 0, small, normal) | (code & 0x80U) << 24U);
  }

 private:
  // Without a branch, which a compiler that keeps floating-point traps would make and not vectorise.
  static std::uint32_t chosen(bool is_first, std::uint32_t first, std::uint32_t second) {
    const std::uint32_t mask = 0U - static_cast<std::uint32_t>(is_first);
    return (first & mask) | (second & ~mask);
  }
};

}  // namespace lamina_baselines
