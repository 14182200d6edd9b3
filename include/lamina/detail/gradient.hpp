// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstddef>
#include <limits>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <variant>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/half.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// What a residual of T can add: T itself and the half-width types.
template <class G, class T>
concept addable_to = std::same_as<G, T> || half_element<G>;

// Of one span, or of the one that a variant of spans holds.
template <class Visitor, class Elements>
void visit_span(const Visitor& visitor, const Elements& elements) {
  if constexpr (is_variant<Elements>) {
    visit(visitor, elements);
  } else {
    visitor(elements);
  }
}

/// Calls visitor(std::span<const G>) for the elements of a gradient, whatever G of the addable ones it holds. Throws
/// std::invalid_argument for one that holds another type at run time.
template <element T, class Tensor, class Visitor>
void visit_gradient(const Tensor& gradient, const Visitor& visitor) {
  require_tensor<const Tensor>();
  const auto elements = tensor_traits<Tensor>::elements(gradient);
  using seen = std::remove_const_t<decltype(elements)>;
  const auto visit_one = [&](auto span) {
    using G = std::remove_const_t<typename decltype(span)::element_type>;
    if constexpr (addable_to<G, T>) {
      visitor(std::span<const G>(span));
    } else {
      static_assert(is_variant<seen>,
                    "lamina: the gradient's element type is neither the residual's, nor lamina::float16 or "
                    "lamina::bfloat16");
      refuse<std::invalid_argument>(
          "the gradient holds another element type at run time than the residual: pass a converted copy");
    }
  };
  visit_span(visit_one, elements);
}

/// The same to write: calls visitor(std::span<G>). Throws std::invalid_argument for what is neither T nor half-width.
template <element T, class Tensor, class Visitor>
void visit_writable(Tensor&& tensor, const Visitor& visitor) {
  require_tensor<Tensor>();
  const auto elements = tensor_traits<std::remove_cvref_t<Tensor>>::elements(tensor);
  using seen = std::remove_const_t<decltype(elements)>;
  const auto visit_one = [&](auto span) {
    if constexpr (addable_to<typename decltype(span)::element_type, T>) {
      visitor(span);
    } else {
      static_assert(
          is_variant<seen>,
          "lamina: the tensor to write is const, or its element type is neither the one that is written, "
          "nor lamina::float16 or lamina::bfloat16");
      refuse<std::invalid_argument>(
          "the tensor to write holds another element type at run time than can be written");
    }
  };
  visit_span(visit_one, elements);
}

/// A finite number as a half: the nearest, and the largest where it is beyond the range. NaN stays NaN.
template <half_element Half, element T>
constexpr Half to_nearest(T x) noexcept {
  constexpr T largest = (std::numeric_limits<float>::max)();
  if (is_nan(static_cast<double>(x))) return Half{0x7fff};
  return saturating_round<Half>(static_cast<float>(x < -largest ? -largest : x > largest ? largest : x));
}

}  // namespace lamina::inline LAMINA_ABI::detail

namespace lamina::inline LAMINA_ABI {

/// A tensor of any type as a gradient of T: the elements where they lie, of T, float16 or bfloat16. For a list of tensors of
/// several types; owns nothing. One that is not there, as an empty std::optional, is a layer without a gradient.
template <element T>
class tensor_ref {
 public:
  /// Throws std::invalid_argument for a tensor that holds another element type at run time.
  template <class Tensor>
  requires(!std::same_as<std::remove_cvref_t<Tensor>, tensor_ref>) tensor_ref(const Tensor& tensor)
      : has_value_(detail::has_value(tensor)) {
    if (has_value_) detail::visit_gradient<T>(tensor, [this](auto elements) { elements_ = elements; });
  }

 private:
  friend struct tensor_traits<tensor_ref>;
  std::variant<std::span<const T>, std::span<const float16>, std::span<const bfloat16>> elements_;
  bool has_value_;
};

template <element T>
struct tensor_traits<tensor_ref<T>> {
  static const auto& elements(const tensor_ref<T>& each) { return each.elements_; }
  static bool has_value(const tensor_ref<T>& each) { return each.has_value_; }
};

}  // namespace lamina::inline LAMINA_ABI
