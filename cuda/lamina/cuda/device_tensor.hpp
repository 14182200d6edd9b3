// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <variant>

#include "lamina/detail/abi.hpp"
#include "lamina/half.hpp"
#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

enum class device_element : std::uint8_t { float32, float64, float16, bfloat16 };

/// lamina.cuh adds the half types of CUDA.
template <class G>
struct device_element_of;
template <>
struct device_element_of<float> : std::integral_constant<device_element, device_element::float32> {};
template <>
struct device_element_of<double> : std::integral_constant<device_element, device_element::float64> {};
template <>
struct device_element_of<float16> : std::integral_constant<device_element, device_element::float16> {};
template <>
struct device_element_of<bfloat16> : std::integral_constant<device_element, device_element::bfloat16> {};

class device_tensor;

namespace detail {

LAMINA_HOST_DEVICE constexpr std::size_t element_bytes(device_element type) noexcept {
  return type == device_element::float64 ? 8 : type == device_element::float32 ? 4 : 2;
}

template <class G>
concept device_storable = requires {
  device_element_of<std::remove_const_t<G>>::value;
};

/// thrust::device_vector and the like, whose data() is a fancy pointer.
template <class Vector>
concept fancy_vector = requires(Vector& vector) {
  vector.data().get();
  vector.size();
};

template <class Tensor>
concept has_device_elements = requires(Tensor& each) {
  tensor_traits<std::remove_cvref_t<Tensor>>::device_elements(each);
};

/// A type that owns its elements is taken as an lvalue alone.
template <class Tensor>
concept device_tensor_like =
    !std::same_as<std::remove_cvref_t<Tensor>, device_tensor> && !fancy_vector<Tensor> &&
    (std::is_lvalue_reference_v<Tensor> || !std::ranges::range<Tensor> ||
     std::ranges::borrowed_range<Tensor>)&&(has_device_elements<Tensor> || lamina::tensor<Tensor>);

}  // namespace detail

/// Contiguous elements in a device's memory: a pointer, their number and their type. Made of a thrust::device_vector, of a raw pointer
/// and a size or shape, or of any tensor of lamina, whose pointer is then the device's. A framework's type whose tensors lie here or
/// there has a second function in its traits, which the device asks instead; it returns a span or a std::variant of spans:
///
///     template <>
///     struct lamina::tensor_traits<their_tensor> {
///       static std::span<float> elements(const their_tensor&);         // throws unless it lies in host memory
///       static std::span<float> device_elements(const their_tensor&);  // throws unless it lies in the device's
///     };
///
/// Does not own the memory.
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
  device_tensor(G* data, std::span<const std::size_t> shape)
      : device_tensor(data, layer{"", {shape.begin(), shape.end()}}.elements()) {}

  template <detail::fancy_vector Vector>
  device_tensor(Vector& vector) : device_tensor(vector.data().get(), vector.size()) {}

  /// Throws std::invalid_argument if it holds, at run time, an element type that the device does not take.
  template <detail::device_tensor_like Tensor>
  device_tensor(Tensor&& tensor) : device_tensor(of(elements_of_tensor(tensor))) {}

  void* data() const noexcept { return data_; }
  std::size_t elements() const noexcept { return elements_; }
  device_element type() const noexcept { return type_; }
  bool is_writable() const noexcept { return is_writable_; }

 private:
  template <class Tensor>
  static auto elements_of_tensor(Tensor& tensor) {
    using traits = tensor_traits<std::remove_const_t<Tensor>>;
    if constexpr (detail::has_device_elements<Tensor>) {
      return traits::device_elements(tensor);
    } else {
      return traits::elements(tensor);
    }
  }

  template <class G, std::size_t Extent>
  static device_tensor of(std::span<G, Extent> elements) {
    static_assert(detail::device_storable<G>,
                  "lamina: the elements are neither float, double, float16 nor bfloat16, nor one of CUDA's "
                  "half types with lamina.cuh");
    return {elements.data(), elements.size()};
  }
  template <class... Spans>
  static device_tensor of(const std::variant<Spans...>& elements) {
    return std::visit(
        []<class G, std::size_t Extent>(std::span<G, Extent> span) -> device_tensor {
          if constexpr (detail::device_storable<G>) {
            return of(span);
          } else {
            throw std::invalid_argument(
                "the tensor holds an element type other than float, double and half-width");
          }
        },
        elements);
  }

  void* data_ = nullptr;
  std::size_t elements_ = 0;
  device_element type_ = device_element::float32;
  bool is_writable_ = true;
};

}  // namespace lamina::inline LAMINA_ABI::cuda
