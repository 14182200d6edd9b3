// SPDX-License-Identifier: MIT
// A pass that adds a gradient to a residual, for a look at its machine code.
#include <cstddef>
#include <span>

#include "lamina/lamina.hpp"

double pass(lamina::residual_accumulator<float>& residual, std::span<const float> gradient);

double pass(lamina::residual_accumulator<float>& residual, std::span<const float> gradient) {
  double value = 0;
  residual.accumulate(
      0, 1, [&](std::size_t, const auto& visitor) { visitor(gradient); }, std::span(&value, 1));
  return value;
}
