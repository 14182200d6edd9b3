// SPDX-License-Identifier: MIT
// A pass that adds a gradient to a residual, for a look at its machine code.
#include <cstddef>
#include <span>

#include "lamina/lamina.hpp"

double pass(lamina::residual_accumulator<float>& residual, std::span<const float> gradient);

double pass(lamina::residual_accumulator<float>& residual, std::span<const float> gradient) {
  return residual.accumulate(0, gradient);
}
