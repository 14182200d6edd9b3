// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>

#include "lamina/error.hpp"
#include "lamina/execution.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/tensor.hpp"

namespace lamina_test {

/// Adds the gradient of one layer, and gives its representative value. Throws lamina::non_finite_gradient where it is refused.
template <lamina::element T, class Tensor, lamina::representative Representative = lamina::mean_abs,
          lamina::execution Execution = lamina::sequential>
double accumulate(lamina::residual_accumulator<T>& residual, std::size_t layer, const Tensor& gradient,
                  const Representative& representative = {}, const Execution& execution = {},
                  double scale = 1) {
  double value = 0;
  const auto only = [&](std::size_t, const auto& visitor) {
    lamina::detail::visit_gradient<T>(gradient, visitor);
  };
  if (residual.accumulate(layer, layer + 1, only, std::span(&value, 1), representative, execution, scale))
    throw lamina::non_finite_gradient(layer, layer, residual.model()[layer].name, "refused");
  return value;
}

}  // namespace lamina_test
