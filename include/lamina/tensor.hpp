// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <ranges>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <variant>

/// What counts as a tensor: anything whose elements lie in one contiguous piece of memory.
///
/// std::span, std::vector, std::array and every other contiguous range work as they are. Any other type is
/// taught by one short specialisation of tensor_traits:
///
///     template <> struct lamina::tensor_traits<my_tensor> {
///       static auto elements(const my_tensor& t) { return std::span<const float>(t.data, t.count); }
///       static auto elements(my_tensor& t) { return std::span<float>(t.data, t.count); }  // to write into it
///     };
///
/// A type that knows its element type only at run time returns a std::variant of spans (see adapt/torch.hpp).
namespace lamina {

/// The element types that residuals, frames and representative values are computed in.
template <class T>
concept element = std::same_as<T, float> || std::same_as<T, double>;

/// The one customisation point: `elements(tensor)` gives the span, or a std::variant of spans, over its
/// elements.
template <class Tensor>
struct tensor_traits;

/// Every contiguous, sized range is a tensor as it is.
template <class Range>
requires std::ranges::contiguous_range<Range> && std::ranges::sized_range<Range>
struct tensor_traits<Range> {
  template <class Self>
  static auto elements(Self& range) {
    return std::span(std::ranges::data(range), std::ranges::size(range));
  }
};

/// True for the types that tensor_traits knows.
template <class Tensor>
concept tensor = requires(Tensor& each) {
  tensor_traits<std::remove_cvref_t<Tensor>>::elements(each);
};

namespace detail {

template <class>
inline constexpr bool is_variant = false;
template <class... Spans>
inline constexpr bool is_variant<std::variant<Spans...>> = true;

template <class Tensor>
constexpr void require_tensor() {
  static_assert(
      tensor<Tensor>,
      "lamina: not a tensor. Pass a contiguous range (std::span, std::vector, ...), include the adapter of "
      "your library from lamina/adapt/, or specialise lamina::tensor_traits for your type");
}

template <class T, class Elements>
auto narrow_to(const Elements& elements) {
  if constexpr (is_variant<Elements>) {
    return std::visit(
        [](auto span) -> std::span<T> {
          if constexpr (std::is_convertible_v<decltype(span), std::span<T>>) {
            return span;
          } else {
            throw std::invalid_argument("tensor holds another element type at run time");
          }
        },
        elements);
  } else {
    static_assert(
        std::is_convertible_v<Elements, std::span<T>>,
        "lamina: the tensor's element type differs from the one asked for, or the tensor is const where "
        "it is written to");
    return std::span<T>(elements);
  }
}

}  // namespace detail

/// The elements of `tensor` to read, as T. A type that is known only at run time and is not T throws
/// std::invalid_argument; one that is known at compile time and is not T does not compile.
template <element T, class Tensor>
std::span<const T> elements_of(const Tensor& tensor) {
  detail::require_tensor<const Tensor>();
  return detail::narrow_to<const T>(tensor_traits<Tensor>::elements(tensor));
}

/// The elements of `tensor` to write. A view (std::span, a framework's tensor handle) may be passed as an
/// rvalue.
template <element T, class Tensor>
std::span<T> writable_elements_of(Tensor&& tensor) {
  detail::require_tensor<Tensor>();
  return detail::narrow_to<T>(tensor_traits<std::remove_cvref_t<Tensor>>::elements(tensor));
}

}  // namespace lamina
