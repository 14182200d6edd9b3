// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <variant>

#include <lamina/half.hpp>
#include <lamina/tensor.hpp>

namespace lamina_python {

using lamina::bfloat16;
using lamina::float16;

/// The element types of arrays, as a number: they are known at run time.
enum class element_type : std::uint8_t { float32, float64, float16, bfloat16 };

template <class G>
inline constexpr element_type element_type_of = std::is_same_v<G, double>     ? element_type::float64
                                                : std::is_same_v<G, float16>  ? element_type::float16
                                                : std::is_same_v<G, bfloat16> ? element_type::bfloat16
                                                                              : element_type::float32;

[[nodiscard]] constexpr std::size_t element_bytes(element_type type) noexcept {
  return type == element_type::float64 ? 8 : type == element_type::float32 ? 4 : 2;
}

/// Contiguous elements of a type that is known at run time: a pointer, a number and a type. Owns nothing. One
/// without data and elements, as it is made by default, says that a layer has no gradient in this step; an empty layer's is
/// any_tensor::empty().
class any_tensor {
 public:
  any_tensor() = default;
  /// \param data      aligned for its type, in memory of this process; null only for 0 elements
  /// \param elements  their number
  /// \param type      of each element
  any_tensor(void* data, std::size_t elements, element_type type) : any_tensor(data, elements, type, true) {}
  any_tensor(const void* data, std::size_t elements, element_type type)
      : any_tensor(const_cast<void*>(data), elements, type, false) {}
  any_tensor(std::nullptr_t, std::size_t elements, element_type type)
      : any_tensor(nullptr, elements, type, true) {}
  static any_tensor empty(element_type type) { return any_tensor(nullptr, 0, type, true); }

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t elements() const noexcept { return elements_; }
  [[nodiscard]] element_type type() const noexcept { return type_; }
  [[nodiscard]] bool is_writable() const noexcept { return is_writable_; }
  [[nodiscard]] bool has_value() const noexcept { return has_value_; }

 private:
  any_tensor(void* data, std::size_t elements, element_type type, bool is_writable)
      : data_(data), elements_(elements), type_(type), is_writable_(is_writable), has_value_(true) {
    if (data == nullptr && elements > 0) {
      throw std::invalid_argument("a tensor of " + std::to_string(elements) + " elements at a null pointer");
    }
    if (type > element_type::bfloat16) throw std::invalid_argument("a tensor of an unknown element type");
    if (reinterpret_cast<std::uintptr_t>(data) % element_bytes(type) != 0) {
      throw std::invalid_argument("a tensor's memory is not aligned to its elements");
    }
  }

  void* data_ = nullptr;
  std::size_t elements_ = 0;
  element_type type_ = element_type::float32;
  bool is_writable_ = false;
  bool has_value_ = false;
};

}  // namespace lamina_python

/// Reading takes any; writing throws std::invalid_argument for one that was made of const elements.
template <>
struct lamina::tensor_traits<lamina_python::any_tensor> {
  using spans = std::variant<std::span<float>, std::span<double>, std::span<float16>, std::span<bfloat16>>;
  using const_spans = std::variant<std::span<const float>, std::span<const double>, std::span<const float16>,
                                   std::span<const bfloat16>>;

  static bool has_value(const lamina_python::any_tensor& tensor) { return tensor.has_value(); }
  static const_spans elements(const lamina_python::any_tensor& tensor) {
    return spans_of<const_spans, const void>(tensor);
  }
  static spans elements(lamina_python::any_tensor& tensor) {
    if (tensor.has_value() && !tensor.is_writable())
      throw std::invalid_argument("the tensor is const and would be written to");
    return spans_of<spans, void>(tensor);
  }

 private:
  template <class Spans, class Memory>
  static Spans spans_of(const lamina_python::any_tensor& tensor) {
    if (!tensor.has_value()) throw std::invalid_argument("there is no tensor (no gradient in this step?)");
    const auto span_of = [&](auto of_type) {
      using G = decltype(of_type);
      using each = std::conditional_t<std::is_const_v<Memory>, const G, G>;
      return Spans(std::span<each>(static_cast<each*>(tensor.data()), tensor.elements()));
    };
    switch (tensor.type()) {
      case lamina_python::element_type::float64:
        return span_of(double());
      case lamina_python::element_type::float16:
        return span_of(float16());
      case lamina_python::element_type::bfloat16:
        return span_of(bfloat16());
      default:
        return span_of(float());
    }
  }
};
