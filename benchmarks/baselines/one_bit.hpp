// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "method.hpp"

namespace lamina_baselines {

/// The sign of every element, and for each row of a layer (its first dimension) the mean of the numbers at or above zero
/// and that of those below, which stand for them.
/// Source: Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014), where a row is a matrix's column.
class one_bit final : public error_feedback {
 public:
  explicit one_bit(const lamina::layout& model) : error_feedback(model) {}

  void step(std::span<const float> gradient) override {
    begin_message();
    for (std::size_t l = 0; l < model().layers(); ++l) {
      const std::span<float> residual = add(l, gradient);
      const std::size_t row = row_elements(l);
      for (std::size_t begin = 0; begin < residual.size(); begin += row)
        quantize(residual.subspan(begin, row));
    }
  }

  void receive(std::span<float> sum) const override {
    message_reader reader(message());
    for (std::size_t l = 0; l < model().layers(); ++l) {
      const std::size_t row = row_elements(l);
      float* to = sum.data() + model().offset(l);
      for (std::size_t begin = 0; begin < model().sizes()[l]; begin += row) {
        const float means[2] = {reader.read<float>(), reader.read<float>()};
        const std::byte* bits = reader.take((row + 7) / 8);
        for (std::size_t i = 0; i < row; ++i) {
          to[begin + i] += means[std::to_integer<unsigned>(bits[i / 8] >> (i % 8)) & 1U];
        }
      }
    }
  }

 private:
  std::size_t row_elements(std::size_t layer) const {
    const auto& shape = model()[layer].shape;
    const std::size_t elements = model().sizes()[layer];
    return shape.size() < 2 || elements == 0 ? std::max<std::size_t>(elements, 1) : elements / shape.front();
  }

  void quantize(std::span<float> row) {
    float above = 0;
    float below = 0;
    std::uint32_t negative = 0;
#pragma omp simd reduction(+ : above, below, negative)
    for (std::size_t i = 0; i < row.size(); ++i) {
      above += std::max(row[i], 0.0F);
      below += std::min(row[i], 0.0F);
      negative += row[i] < 0 ? 1 : 0;
    }
    const auto mean = [](float sum, std::size_t count) {
      return count == 0 ? 0 : sum / static_cast<float>(count);
    };
    const float means[2] = {mean(above, row.size() - negative), mean(below, negative)};
    for (const float each : means) write(each);
    std::byte* bits = extend((row.size() + 7) / 8);
    for (std::size_t i = 0; i < row.size(); i += 8) {
      unsigned byte = 0;
      for (std::size_t k = 0; k < std::min<std::size_t>(8, row.size() - i); ++k) {
        float& each = row[i + k];
        const unsigned side = each >= 0 ? 0 : 1;
        byte |= side << k;
        each -= means[side];
      }
      bits[i / 8] = static_cast<std::byte>(byte);
    }
    touch(3 * row.size_bytes() + row.size() / 8);
  }
};

}  // namespace lamina_baselines
