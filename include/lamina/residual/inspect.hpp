// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/detail/widen.hpp"
#include "lamina/layout.hpp"
#include "lamina/residual/blocks.hpp"
#include "lamina/residual/gradient.hpp"
#include "lamina/tensor.hpp"

/// Looking at gradients without adding them.
namespace lamina::inline LAMINA_ABI::detail {

/// Tensor l of a range of them.
template <class Tensors>
decltype(auto) tensor_at(const Tensors& tensors, std::size_t layer) {
  return std::begin(tensors)[static_cast<std::ptrdiff_t>(layer)];
}

/// Calls visitor(layer, span) for each layer that has a gradient, once its size was checked.
template <element T, class Tensors, class Visitor>
void visit_all(const layout& model, const Tensors& gradients, const Visitor& visitor) {
  for (std::size_t layer = 0; layer < model.layers(); ++layer) {
    const auto& tensor = tensor_at(gradients, layer);
    if (!has_value(tensor)) continue;
    visit_gradient<T>(tensor, [&](auto from) {
      model.check_size(layer, from.size());
      visitor(layer, from);
    });
  }
}

template <element T, class Tensors, class Execution>
std::optional<std::size_t> first_non_finite(const layout& model, const Tensors& gradients,
                                            const Execution& execution) {
  visit_all<T>(model, gradients, [](std::size_t, auto) {});
  const layer_blocks blocks(model);
  std::vector<char> is_bad(blocks.count());
  blocks.for_each_run(0, model.layers(), execution,
                      [&](std::size_t layer, std::size_t block, std::size_t end) {
                        const auto& tensor = tensor_at(gradients, layer);
                        if (!has_value(tensor)) return;
                        visit_gradient<T>(tensor, [&]<class G>(std::span<const G> from) {
                          for (; block < end; ++block) {
                            const auto [begin, count] = blocks.extent_of(layer, block);
                            const read_only<T, G> source{from.data() + begin};
                            is_bad[block] = !is_finite_magnitude(largest_magnitude<T>(count, source));
                          }
                        });
                      });
  for (std::size_t layer = 0; layer < model.layers(); ++layer) {
    for (std::size_t block = blocks.first(layer); block < blocks.first(layer + 1); ++block) {
      if (is_bad[block] != 0) return layer;
    }
  }
  return std::nullopt;
}

template <element T, class Tensors>
void find_zero(const layout& model, const Tensors& gradients, std::span<char> is_zero) {
  visit_all<T>(model, gradients, [](std::size_t, auto) {});
  for (char& each : is_zero) each = 1;
  visit_all<T>(model, gradients, [&]<class G>(std::size_t layer, std::span<const G> from) {
    for (const G& each : from) {
      if (widened<T>(each) == T(0)) continue;
      is_zero[layer] = 0;
      return;
    }
  });
}

}  // namespace lamina::inline LAMINA_ABI::detail
