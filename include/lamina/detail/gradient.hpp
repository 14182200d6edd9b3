// SPDX-License-Identifier: MIT
#pragma once

#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <variant>

#include "lamina/half.hpp"
#include "lamina/tensor.hpp"

namespace lamina::detail {

/// What a residual of T can add: T itself and the half-width types.
template <class G, class T>
concept addable_to = std::same_as<G, T> || half_element<G>;

/// Calls visitor(std::span<const G>) for the elements of a gradient, whatever G of the addable ones it holds.
template <element T, class Tensor, class Visitor>
auto visit_gradient(const Tensor& gradient, const Visitor& visitor) {
  require_tensor<const Tensor>();
  const auto elements = tensor_traits<Tensor>::elements(gradient);
  if constexpr (is_variant<std::remove_const_t<decltype(elements)>>) {
    return std::visit(
        [&](auto span) {
          using G = std::remove_const_t<typename decltype(span)::element_type>;
          if constexpr (addable_to<G, T>) {
            return visitor(std::span<const G>(span));
          } else {
            throw std::invalid_argument(
                "the gradient holds another element type at run time than the residual: pass a converted "
                "copy");
            return visitor(std::span<const T>());  // gives the lambda its type
          }
        },
        elements);
  } else {
    using G = std::remove_const_t<typename decltype(elements)::element_type>;
    static_assert(addable_to<G, T>,
                  "lamina: the gradient's element type is neither the residual's, nor lamina::float16 or "
                  "lamina::bfloat16");
    return visitor(std::span<const G>(elements));
  }
}

}  // namespace lamina::detail
