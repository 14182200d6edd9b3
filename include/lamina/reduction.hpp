// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <ranges>
#include <span>
#include <type_traits>
#include <variant>

#include "lamina/detail/kernels.hpp"
#include "lamina/half.hpp"
#include "lamina/tensor.hpp"

/// The one summation order that every backend follows, so that a representative value is the same bits
/// everywhere and workers on different machines decide alike:
///
///  - a tensor is cut into blocks of 4,096 elements (the last may be shorter);
///  - within a block, element i goes to lane i mod 64, in order, in the type that the functor's map gives;
///  - the lanes fold as lane[j] = combine(lane[j], lane[j + h]) for h = 32, 16, 8, 4, 2, 1;
///  - the block totals are combined in order, in double.
///
/// Scalar code, SSE2, AVX2 and AVX-512 give identical results because each lane is one sequence of operations
/// that none of them may reorder.
namespace lamina {

/// A representative functor is three functions: `map(x)` of one element, an associative and commutative
/// `combine(a, b)` for which a zero is neutral, and `finish(total, elements)` in double. One whose map is a
/// template over the operand (`auto`) is also applied to whole SIMD registers.
template <class F>
concept representative = requires(const F& functor, float x, double total, std::size_t elements) {
  { functor.combine(functor.map(x), functor.map(x)) } -> std::convertible_to<double>;
  { functor.combine(total, total) } -> std::convertible_to<double>;
  { functor.finish(total, elements) } -> std::convertible_to<double>;
};

namespace detail {

template <element T, representative F, class G>
double reduce_contiguous(const F& functor, std::span<const G> elements) {
  double total = 0;
  for (std::size_t begin = 0; begin < elements.size(); begin += block_elements) {
    const std::size_t count = std::min(block_elements, elements.size() - begin);
    total = functor.combine(
        total, reduce_block<T, G>(functor, count, read_only<T, G>{elements.data() + begin}).total);
  }
  return elements.empty() ? 0.0 : functor.finish(total, elements.size());
}

/// The same with zeros in the place of elements that are not finite.
template <element T, representative F, class G>
double reduce_finite(const F& functor, std::span<const G> elements) {
  std::array<T, block_elements> block;
  double total = 0;
  for (std::size_t begin = 0; begin < elements.size(); begin += block.size()) {
    const std::size_t count = std::min(block.size(), elements.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      const T each = load_as<T, T>(elements.data() + begin + i);
      block[i] = all_finite<T>(std::array{each}) ? each : T(0);
    }
    total = functor.combine(total, reduce_block<T, T>(functor, count, read_only<T>{block.data()}).total);
  }
  return elements.empty() ? 0.0 : functor.finish(total, elements.size());
}

/// The same for a range that is not contiguous: block by block through a buffer, hence the same bits.
template <representative F, class Range>
double reduce_range(const F& functor, const Range& range) {
  using T = std::remove_cvref_t<std::ranges::range_reference_t<const Range>>;
  std::array<T, block_elements> block;
  double total = 0;
  std::size_t elements = 0;
  for (auto it = std::ranges::begin(range); it != std::ranges::end(range);) {
    std::size_t count = 0;
    for (; count < block.size() && it != std::ranges::end(range); ++it) block[count++] = *it;
    total = functor.combine(total, reduce_block<T, T>(functor, count, read_only<T>{block.data()}).total);
    elements += count;
  }
  return elements == 0 ? 0.0 : functor.finish(total, elements);
}

template <class Range>
concept element_range = std::ranges::input_range<const Range> &&
    element<std::remove_cvref_t<std::ranges::range_reference_t<const Range>>>;

}  // namespace detail

/// The representative value of a tensor: 0 if it has no elements. Cost: one pass, no allocation.
/// Deterministic: the same bits on every machine and instruction set. NaN and infinity give an unspecified
/// value.
template <representative F, class Tensor>
double representative_value(const F& functor, const Tensor& tensor) {
  if constexpr (lamina::tensor<const Tensor>) {
    const auto elements = tensor_traits<Tensor>::elements(tensor);
    if constexpr (detail::is_variant<std::remove_const_t<decltype(elements)>>) {
      return std::visit([&](auto span) { return representative_value(functor, span); }, elements);
    } else {
      using G = std::remove_const_t<typename decltype(elements)::element_type>;
      static_assert(element<G> || half_element<G>,
                    "lamina: the element type must be float, double, lamina::float16 or lamina::bfloat16");
      using T = std::conditional_t<element<G>, G, float>;
      return detail::reduce_contiguous<T>(functor, std::span<const G>(elements));
    }
  } else if constexpr (detail::element_range<Tensor>) {
    return detail::reduce_range(functor, tensor);
  } else {
    detail::require_tensor<const Tensor>();
    return 0;
  }
}

}  // namespace lamina
