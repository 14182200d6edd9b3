// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "lamina/half.hpp"
#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"

namespace lamina::cuda {

enum class device_element : std::uint8_t { float32, float64, float16, bfloat16 };

/// How the device's own half types map to lamina's; lamina.cuh adds those of CUDA.
template <class G>
struct device_element_of;
template <>
struct device_element_of<float> {
  static constexpr device_element value = device_element::float32;
};
template <>
struct device_element_of<double> {
  static constexpr device_element value = device_element::float64;
};
template <>
struct device_element_of<lamina::float16> {
  static constexpr device_element value = device_element::float16;
};
template <>
struct device_element_of<lamina::bfloat16> {
  static constexpr device_element value = device_element::bfloat16;
};

/// Elements that lie in one piece of a device's memory: a pointer, their number and their type. Made of anything
/// contiguous whose data() may be a device pointer, thrust::device_vector included, or of a raw pointer and a size or
/// shape. Holds no memory of its own.
class device_tensor {
 public:
  device_tensor() = default;

  template <class G>
  device_tensor(G* data, std::size_t elements)
      : data_(const_cast<std::remove_const_t<G>*>(data)),
        elements_(elements),
        type_(device_element_of<std::remove_const_t<G>>::value),
        is_writable_(!std::is_const_v<G>) {}

  template <class G>
  device_tensor(G* data, std::span<const std::size_t> shape) : device_tensor(data, elements_of(shape)) {}

  template <class G, std::size_t Extent>
  device_tensor(std::span<G, Extent> elements) : device_tensor(elements.data(), elements.size()) {}

  /// thrust::device_vector and the like, whose data() is a fancy pointer.
  template <class Vector>
  requires requires(Vector& vector) {
    vector.data().get();
    vector.size();
  }
  device_tensor(Vector& vector) : device_tensor(vector.data().get(), vector.size()) {}

  void* data() const noexcept { return data_; }
  std::size_t elements() const noexcept { return elements_; }
  device_element type() const noexcept { return type_; }
  bool is_writable() const noexcept { return is_writable_; }
  std::size_t element_bytes() const noexcept {
    return type_ == device_element::float64 ? 8 : type_ == device_element::float32 ? 4 : 2;
  }
  /// `count` elements from `begin` on.
  device_tensor part(std::size_t begin, std::size_t count) const noexcept {
    device_tensor piece = *this;
    piece.data_ = static_cast<std::byte*>(data_) + begin * element_bytes();
    piece.elements_ = count;
    return piece;
  }

 private:
  static std::size_t elements_of(std::span<const std::size_t> shape) {
    return layer{"", {shape.begin(), shape.end()}}.elements();
  }

  void* data_ = nullptr;
  std::size_t elements_ = 0;
  device_element type_ = device_element::float32;
  bool is_writable_ = true;
};

}  // namespace lamina::cuda
