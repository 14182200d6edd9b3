// SPDX-License-Identifier: MIT
#pragma once

#include <Eigen/Core>
#include <cstddef>
#include <span>

#include "lamina/tensor.hpp"

/// Eigen: Eigen::Matrix and Eigen::Array (fixed and dynamic), Eigen::Map, Eigen::Ref, and blocks and transposes of them, are read and
/// written where they lie, without a copy, in the order of their memory: a column-major one, Eigen's default, column by column.
///
/// What has gaps does not compile if that is known at compile time (a Map with InnerStride<2>, a row of a column-major Matrix4f), and
/// throws std::invalid_argument if it is known only at run time (an outer stride). Expressions such as `2 * a + b` do not compile.
namespace lamina::inline LAMINA_ABI {

namespace detail {

template <class Derived>
void accept_eigen_dense(const Eigen::DenseBase<Derived>&);

template <class T>
concept eigen_dense = requires(const T& each) {
  accept_eigen_dense(each);
};

// Known at compile time to have gaps.
template <class T>
constexpr bool eigen_is_strided() {
  constexpr int inner_stride = T::InnerStrideAtCompileTime;
  constexpr int outer_stride = T::OuterStrideAtCompileTime;
  constexpr int inner_size = T::InnerSizeAtCompileTime;
  constexpr bool outer_is_known =
      !T::IsVectorAtCompileTime && outer_stride != Eigen::Dynamic && inner_size != Eigen::Dynamic;
  if (T::SizeAtCompileTime == 0 || T::SizeAtCompileTime == 1) return false;
  return (inner_stride != 1 && inner_stride != Eigen::Dynamic) ||
         (outer_is_known && outer_stride != inner_size);
}

template <class T>
concept eigen_in_memory = eigen_dense<T> &&(T::Flags& Eigen::DirectAccessBit) != 0 &&
                          !eigen_is_strided<T>() && requires(const T& each) {
  each.data();  // not so for Eigen::MatrixBase<...> itself
};

template <class T>
concept eigen_expression = eigen_dense<T> && !eigen_in_memory<T>;

}  // namespace detail

template <detail::eigen_in_memory Matrix>
struct tensor_traits<Matrix> {
  template <class Self>
  static auto elements(Self& matrix) {
    const auto extent_of = [&](std::size_t d) { return d == 0 ? matrix.outerSize() : matrix.innerSize(); };
    const auto stride_of = [&](std::size_t d) {
      return d == 0 ? matrix.outerStride() : matrix.innerStride();
    };
    if (matrix.size() > 0 && !detail::is_dense(2, extent_of, stride_of)) {
      detail::refuse_tensor(
          "the Eigen object has gaps between its elements in memory: pass its .eval(); to write "
          "into it, write into an Eigen::Matrix and assign that");
    }
    return std::span(matrix.data(), static_cast<std::size_t>(matrix.size()));
  }
};

template <detail::eigen_expression Expression>
struct tensor_traits<Expression> {
  struct refusal {
    static_assert(
        detail::never<Expression>,
        "lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass "
        "(expression).eval(); to write into a block, write into an Eigen::Matrix and assign that");
  };
};

}  // namespace lamina::inline LAMINA_ABI
