// SPDX-License-Identifier: MIT
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"

/// torch::Tensor as a tensor of lamina: read from and written to where it lies, without a copy.
///
/// A torch::Tensor tells its type, device and strides only at run time; one that is not a dense, contiguous
/// float or double tensor in CPU memory throws std::invalid_argument that says what to call. What
/// channels_last or a transpose permutes counts as not contiguous, since the elements of one layer must have
/// one order on all workers. Tensors without elements and of dimension 0 (one element) are tensors as any
/// other.
///
/// torch::Tensor is a handle: a const one may be written through. Writing goes past autograd, as through
/// Tensor::data_ptr: parameters that require a gradient may be written without torch::NoGradGuard, and
/// autograd does not notice, so do not write between a forward pass and its backward pass what the latter
/// reads.
template <>
struct lamina::tensor_traits<at::Tensor> {
  static std::variant<std::span<float>, std::span<double>> elements(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      throw std::invalid_argument("torch tensor is undefined (no gradient was computed?)");
    }
    if (!tensor.device().is_cpu()) throw std::invalid_argument("torch tensor is not on the CPU: call .cpu()");
    // A sparse tensor has no strides to be asked for.
    if (tensor.layout() != at::kStrided) {
      throw std::invalid_argument("torch tensor is not dense (sparse or MKL-DNN): call .to_dense()");
    }
    if (!tensor.is_contiguous()) {
      throw std::invalid_argument(
          "torch tensor is not contiguous: call .contiguous(); to write into it, write into a "
          "contiguous one and .copy_() that");
    }
    // Its memory holds the values with the other sign.
    if (tensor.is_neg()) throw std::invalid_argument("torch tensor is lazily negated: call .resolve_neg()");

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

/// The layer of a named torch tensor: its name and shape. Throws std::invalid_argument, naming it, for an
/// undefined tensor.
inline layer layer_of(std::string name, const at::Tensor& tensor) {
  if (!tensor.defined()) throw std::invalid_argument("layer '" + name + "': the torch tensor is undefined");
  return {std::move(name), {tensor.sizes().begin(), tensor.sizes().end()}};
}

}  // namespace lamina
