// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>

/// std::mdspan in the members that lamina/adapt/mdspan.hpp asks for, for compilers that have none: two dimensions, any strides.
namespace lamina_test {

struct strided_mapping {
  std::array<std::size_t, 2> extents;
  std::array<std::size_t, 2> strides;

  std::size_t elements() const { return extents[0] * extents[1]; }
  std::size_t required_span_size() const {
    return elements() == 0 ? 0 : 1 + (extents[0] - 1) * strides[0] + (extents[1] - 1) * strides[1];
  }
  bool is_unique() const { return elements() <= 1 || (strides[0] != 0 && strides[1] != 0); }
  bool is_exhaustive() const { return required_span_size() == elements(); }
};

template <class T>
class mdspan {
 public:
  using element_type = T;
  using reference = T&;

  mdspan(T* data, std::size_t rows, std::size_t columns) : mdspan(data, {{rows, columns}, {columns, 1}}) {}
  mdspan(T* data, const strided_mapping& mapping) : data_(data), mapping_(mapping) {}

  T* data_handle() const { return data_; }
  const strided_mapping& mapping() const { return mapping_; }
  const std::array<std::size_t, 2>& extents() const { return mapping_.extents; }

 private:
  T* data_;
  strided_mapping mapping_;
};

}  // namespace lamina_test
