// SPDX-License-Identifier: MIT
#pragma once

#if __has_include(<xtensor/containers/xcontainer.hpp>)
#include <xtensor/containers/xcontainer.hpp>
#else
#include <xtensor/xcontainer.hpp>
#endif

#include <cstddef>
#include <iterator>
#include <ranges>
#include <span>
#include <stdexcept>
#include <type_traits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/reduction.hpp"
#include "lamina/tensor.hpp"

/// xtensor: what owns or adapts memory is a tensor, everything else can be reduced.
///
/// xt::xarray, xt::xtensor, xt::xtensor_fixed and what xt::adapt gives are read and written where they lie,
/// without a copy, in the order of their memory: a column-major one column by column. One whose strides are
/// known only at run time (layout_type::dynamic) must be dense, row- or column-major, or
/// std::invalid_argument is thrown.
///
/// Views (contiguous ones too), transposes and lazy expressions such as `2 * a + b` have a representative
/// value: their elements are taken once each in row-major order, whatever XTENSOR_DEFAULT_TRAVERSAL says,
/// without evaluating them into memory. It is the same bits as that of the expression assigned to a row-major
/// xt::xarray first, unless xtensor is compiled with XTENSOR_USE_XSIMD, whose vector functions (xt::exp and
/// its like) round differently. Where elements in memory are needed, as for a gradient, they do
/// not compile.
namespace lamina::inline LAMINA_ABI {

namespace detail {

template <class Derived>
void accept_xcontainer(const xt::xcontainer<Derived>&);
template <class Derived>
void accept_xexpression(const xt::xexpression<Derived>&);

// In memory of its own or adapted, and dense as far as is known at compile time.
template <class T>
concept xtensor_container = requires(const T& each) {
  accept_xcontainer(each);
  std::span(each.storage().data(), each.size());  // not so for a std::deque
};

template <class T>
concept xtensor_expression = !xtensor_container<T> && requires(const T& each) {
  accept_xexpression(each);
};

// Whether the strides are those of a dense tensor whose innermost dimension comes first here. xtensor gives a
// dimension of 1 the stride 0.
template <class Dimension, class Stride>
bool strides_are_dense(Dimension dimension, Stride stride, std::size_t dimensions) {
  std::ptrdiff_t expected = 1;
  for (; dimensions > 0; --dimensions, ++dimension, ++stride) {
    if (*dimension != 1 && static_cast<std::ptrdiff_t>(*stride) != expected) return false;
    expected *= static_cast<std::ptrdiff_t>(*dimension);
  }
  return true;
}

// xtensor's own is_contiguous() says no for a last dimension of 1, and yes for some that have gaps.
template <class Container>
bool is_dense_container(const Container& tensor) {
  if (Container::static_layout != xt::layout_type::dynamic || tensor.size() == 0) return true;
  const auto& shape = tensor.shape();
  const auto& strides = tensor.strides();
  return strides_are_dense(shape.begin(), strides.begin(), shape.size()) ||
         strides_are_dense(shape.rbegin(), strides.rbegin(), shape.size());
}

// The elements in row-major order. Counted, since xtensor's iterators need not be C++20 sentinels.
template <class CountedIterator>
struct row_major_elements {
  auto begin() const { return first; }
  static auto end() { return std::default_sentinel; }

  CountedIterator first;
};

}  // namespace detail

template <detail::xtensor_container Container>
struct tensor_traits<Container> {
  template <class Self>
  static auto elements(Self& tensor) {
    if (!detail::is_dense_container(tensor)) {
      detail::raise(std::invalid_argument(
          "the xtensor container has gaps between its elements in memory: assign it to an xt::xarray and "
          "pass that"));
    }
    return std::span(tensor.data(), tensor.size());
  }
};

template <detail::xtensor_expression Expression>
struct tensor_traits<Expression> {
  struct refusal {
    static_assert(
        detail::never<Expression>,
        "lamina: an xtensor view or lazy expression has no elements in one piece of memory. Pass "
        "xt::eval(expression); to write into a view, write into an xt::xarray and assign that to the view");
  };
};

/// The representative value of a view or lazy expression, which is evaluated element by element in row-major
/// order. Cost: one pass; no allocation but what the expression itself makes.
template <representative F, detail::xtensor_expression Expression>
double representative_value(const F& functor, const Expression& expression) {
  static_assert(element<std::remove_cv_t<typename Expression::value_type>>,
                "lamina: the elements of the expression are neither float nor double. Pass "
                "xt::cast<float>(expression)");
  std::counted_iterator first(expression.template begin<xt::layout_type::row_major>(),
                              static_cast<std::ptrdiff_t>(expression.size()));
  return detail::reduce_range(functor, detail::row_major_elements<decltype(first)>{first});
}

}  // namespace lamina::inline LAMINA_ABI
