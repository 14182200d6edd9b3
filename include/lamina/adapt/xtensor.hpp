// SPDX-License-Identifier: MIT
#pragma once

#if __has_include(<xtensor/containers/xcontainer.hpp>)
#include <xtensor/containers/xcontainer.hpp>
#else
#include <xtensor/xcontainer.hpp>
#endif

#include <cstddef>
#include <span>

#include "lamina/tensor.hpp"

/// xtensor: xt::xarray, xt::xtensor, xt::xtensor_fixed and what xt::adapt gives are read and written where they lie, without a copy, in the
/// order of their memory: a column-major one column by column. One whose strides are known only at run time must be dense, row- or
/// column-major, or std::invalid_argument is thrown. Views, contiguous ones too, and lazy expressions do not compile: pass xt::eval of
/// them.
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

}  // namespace detail

template <detail::xtensor_container Container>
struct tensor_traits<Container> {
  template <class Self>
  static auto elements(Self& tensor) {
    if (!is_dense(tensor)) {
      detail::refuse_tensor(
          "the xtensor container has gaps between its elements in memory: assign it to an "
          "xt::xarray and pass that");
    }
    return std::span(tensor.data(), tensor.size());
  }

 private:
  // xtensor's own is_contiguous() says no for a last dimension of 1, and yes for some that have gaps.
  static bool is_dense(const Container& tensor) {
    if (Container::static_layout != xt::layout_type::dynamic || tensor.size() == 0) return true;
    const auto& shape = tensor.shape();
    const auto& strides = tensor.strides();
    const std::size_t rank = shape.size();
    return detail::is_dense(
               rank, [&](std::size_t d) { return shape[d]; }, [&](std::size_t d) { return strides[d]; }) ||
           detail::is_dense(
               rank, [&](std::size_t d) { return shape[rank - 1 - d]; },
               [&](std::size_t d) { return strides[rank - 1 - d]; });
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

}  // namespace lamina::inline LAMINA_ABI
