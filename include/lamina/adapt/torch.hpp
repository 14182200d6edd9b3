// SPDX-License-Identifier: MIT
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "lamina/tensor.hpp"

/// torch::Tensor as a tensor of lamina: read and written where it lies, without a copy.
///
/// Dense, contiguous tensors of float, double, or, for gradients, Half or BFloat16 in CPU memory; everything else throws
/// std::invalid_argument that says what to call. What channels_last or a transpose permutes is not contiguous: all workers must have the
/// elements of a layer in one order. worker::add takes an undefined tensor for no gradient.
///
/// A handle: a const one may be written through. Writing goes past autograd, as through Tensor::data_ptr: no torch::NoGradGuard is needed,
/// and autograd does not notice, so do not write between a forward pass and its backward pass what the latter reads.
///
/// On a GPU, lamina::cuda takes the same of a CUDA tensor in its place, and refuses a CPU tensor.
template <>
struct lamina::tensor_traits<at::Tensor> {
  using spans = std::variant<std::span<float>, std::span<double>, std::span<lamina::float16>,
                             std::span<lamina::bfloat16>>;

  static bool has_value(const at::Tensor& tensor) { return tensor.defined(); }

  static spans elements(const at::Tensor& tensor) {
    require_defined(tensor);
    if (!tensor.device().is_cpu()) detail::refuse_tensor("torch tensor is not on the CPU: call .cpu()");
    return dense(tensor);
  }

  /// In the memory of a CUDA device; of which one, on_stream asks CUDA.
  static spans device_elements(const at::Tensor& tensor) {
    require_defined(tensor);
    if (!tensor.device().is_cuda()) {
      detail::refuse_tensor("torch tensor is on ", tensor.device().str(),
                            ", where a CUDA device's is wanted: call .cuda()");
    }
    return dense(tensor);
  }

 private:
  static void require_defined(const at::Tensor& tensor) {
    if (tensor.defined()) return;
    detail::refuse_tensor("torch tensor is undefined (no gradient was computed?)");
  }

  static spans dense(const at::Tensor& tensor) {
    // A sparse tensor has no strides to be asked for.
    if (tensor.layout() != at::kStrided)
      detail::refuse_tensor("torch tensor is not dense (sparse or MKL-DNN): call .to_dense()");
    if (!tensor.is_contiguous()) {
      detail::refuse_tensor(
          "torch tensor is not contiguous: call .contiguous(); to write into it, write into a "
          "contiguous one and .copy_() that");
    }
    // Its memory holds the values with the other sign.
    if (tensor.is_neg()) detail::refuse_tensor("torch tensor is lazily negated: call .resolve_neg()");

    const auto count = static_cast<std::size_t>(tensor.numel());
    switch (tensor.scalar_type()) {
      case at::kFloat:
        return std::span(tensor.data_ptr<float>(), count);
      case at::kDouble:
        return std::span(tensor.data_ptr<double>(), count);
      // Bitwise identical to c10::Half and c10::BFloat16.
      case at::kHalf:
        return std::span(static_cast<lamina::float16*>(tensor.data_ptr()), count);
      case at::kBFloat16:
        return std::span(static_cast<lamina::bfloat16*>(tensor.data_ptr()), count);
      default:
        detail::refuse_tensor("torch tensor holds ", at::toString(tensor.scalar_type()),
                              ", not float, double, Half or BFloat16: call .to(torch::kFloat)");
    }
  }
};

namespace lamina::inline LAMINA_ABI {

/// The model that a torch::nn::Module is: a layer for each parameter, by torch's name for it, in the order of module.parameters().
/// Takes a module or what holds one, such as torch::nn::Linear. Throws std::invalid_argument for an undefined parameter.
template <class Module>
[[nodiscard]] layout layout_of(const Module& module) {
  if constexpr (requires { module->named_parameters(); }) {
    return layout_of(*module);
  } else {
    std::vector<layer> layers;
    for (const auto& each : module.named_parameters()) {
      const at::Tensor& parameter = each.value();
      if (!parameter.defined())
        detail::refuse_tensor("layer '", each.key(), "': the torch tensor is undefined");
      layers.push_back({each.key(), {parameter.sizes().begin(), parameter.sizes().end()}});
    }
    return layout(std::move(layers));
  }
}

/// The gradients of these parameters, for worker::add: handles, no copies. One without a gradient gives an undefined tensor, which is
/// a layer without a gradient there.
[[nodiscard]] inline std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const at::Tensor& each : parameters) gradients.push_back(each.grad());
  return gradients;
}

}  // namespace lamina::inline LAMINA_ABI
