// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstddef>
#include <span>

#include "lamina/tensor.hpp"

/// std::mdspan of C++23, its reference implementation (Kokkos::mdspan, std::experimental::mdspan), and whatever has their members: what
/// lies in memory without gaps is a tensor, read and written where it lies, in the order of its memory: that of layout_right row by row,
/// of layout_left column by column. What has gaps, or has an element twice, throws std::invalid_argument.
///
/// No header of theirs is needed here. An accessor whose elements are no plain references, such as an atomic one, makes no tensor.
namespace lamina::inline LAMINA_ABI {

namespace detail {

template <class T>
concept mdspan_like = requires(const T& each) {
  { each.data_handle() } -> std::same_as<typename T::element_type*>;
  requires std::same_as<typename T::reference, typename T::element_type&>;
  each.extents();
  each.mapping().required_span_size();
  each.mapping().is_exhaustive() && each.mapping().is_unique();
};

}  // namespace detail

template <detail::mdspan_like Mdspan>
struct tensor_traits<Mdspan> {
  static auto elements(const Mdspan& each) {
    const auto& mapping = each.mapping();
    if (!mapping.is_exhaustive() || !mapping.is_unique())
      detail::refuse_tensor(
          "the mdspan does not hold each element once and without gaps: pass a contiguous copy");
    return std::span(each.data_handle(), static_cast<std::size_t>(mapping.required_span_size()));
  }
};

}  // namespace lamina::inline LAMINA_ABI
