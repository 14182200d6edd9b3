// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/half.hpp"
#include "lamina/layout.hpp"
#include "lamina/representative.hpp"
#include "lamina/tensor.hpp"

#include "any_tensor.hpp"

/// Looking at gradients without adding them.
namespace lamina_python {

/// Calls visitor(layer, span) for each layer that has a gradient, once the sizes of all were checked.
template <class Visitor>
void visit_all(const lamina::layout& model, std::span<const any_tensor> gradients, const Visitor& visitor) {
  model.check_count(gradients.size(), "gradients");
  for (const bool is_check : {true, false}) {
    for (std::size_t layer = 0; layer < model.layers(); ++layer) {
      if (!gradients[layer].has_value()) continue;
      lamina::detail::visit_gradient<float>(gradients[layer], [&](auto from) {
        is_check ? model.check_size(layer, from.size()) : visitor(layer, from);
      });
    }
  }
}

/// The first layer whose gradient holds NaN or infinity.
inline std::optional<std::size_t> first_non_finite(const lamina::layout& model,
                                                   std::span<const any_tensor> gradients) {
  std::optional<std::size_t> bad;
  visit_all(model, gradients, [&]<class G>(std::size_t layer, std::span<const G> from) {
    if (!bad && !lamina::detail::are_finite(from)) bad = layer;
  });
  return bad;
}

/// 1 for each layer whose gradient is zero throughout, or that has none. A layer is read up to its first element that is not zero.
inline std::vector<char> zero_layers(const lamina::layout& model, std::span<const any_tensor> gradients) {
  std::vector<char> is_zero(model.layers(), 1);
  visit_all(model, gradients, [&]<class G>(std::size_t layer, std::span<const G> from) {
    for (const G& each : from) {
      if (lamina::detail::widened<float>(each) == 0) continue;
      is_zero[layer] = 0;
      return;
    }
  });
  return is_zero;
}

}  // namespace lamina_python
