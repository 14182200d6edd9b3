// SPDX-License-Identifier: MIT
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <variant>

#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"

/// torch::Tensor as a tensor of lamina: read from and written to where it lies, without a copy.
///
/// A torch::Tensor tells its type, device and strides only at run time; one that is not a dense, contiguous
/// float or double tensor on the CPU throws std::invalid_argument that says what to call.
template <>
struct lamina::tensor_traits<at::Tensor> {
  static std::variant<std::span<float>, std::span<double>> elements(const at::Tensor& tensor) {
    if (!tensor.defined())
      throw std::invalid_argument("torch tensor is undefined (no gradient was computed?)");
    if (!tensor.device().is_cpu()) throw std::invalid_argument("torch tensor is not on the CPU: call .cpu()");
    if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
      throw std::invalid_argument("torch tensor is not contiguous: call .contiguous()");
    }
    const auto count = static_cast<std::size_t>(tensor.numel());
    switch (tensor.scalar_type()) {
      case at::kFloat:
        return std::span(tensor.data_ptr<float>(), count);
      case at::kDouble:
        return std::span(tensor.data_ptr<double>(), count);
      default:
        throw std::invalid_argument(std::string("torch tensor holds ") + at::toString(tensor.scalar_type()) +
                                    ", not float or double: call .to(torch::kFloat)");
    }
  }
};

namespace lamina {

/// The layer of a named torch tensor: its name and shape.
inline layer layer_of(std::string name, const at::Tensor& tensor) {
  return {std::move(name), {tensor.sizes().begin(), tensor.sizes().end()}};
}

}  // namespace lamina
