// SPDX-License-Identifier: MIT
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/half.hpp"
#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"
#include "lamina/tiling.hpp"

/// torch::Tensor as a tensor of lamina: read from and written to where it lies, without a copy.
///
/// A torch::Tensor tells its type, device and strides only at run time; one that is not a dense, contiguous
/// tensor of float, double, Half or BFloat16 in CPU memory throws std::invalid_argument that says what to call. Half and
/// BFloat16 are for gradients, which are added to a residual of float or double: elements_of<float> and what writes, such
/// as step::unpack, refuse them. An undefined tensor, the gradient of a parameter that took no part in the step, has no value:
/// worker::add takes it for no gradient, everything else refuses it. What
/// channels_last or a transpose permutes counts as not contiguous, since the elements of one layer must have
/// one order on all workers. Tensors without elements and of dimension 0 (one element) are tensors as any
/// other.
///
/// torch::Tensor is a handle: a const one may be written through. Writing goes past autograd, as through
/// Tensor::data_ptr: parameters that require a gradient may be written without torch::NoGradGuard, and
/// autograd does not notice, so do not write between a forward pass and its backward pass what the latter
/// reads.
///
/// On a GPU, lamina::cuda takes the same of a CUDA tensor in its place, and refuses a CPU tensor.
template <>
struct lamina::tensor_traits<at::Tensor> {
  using spans = std::variant<std::span<float>, std::span<double>, std::span<lamina::float16>,
                             std::span<lamina::bfloat16>>;

  template <lamina::element T>
  static constexpr const char* conversion_to =
      std::same_as<T, float> ? "call .to(torch::kFloat); to write into it, write into that and .copy_() it"
                             : "call .to(torch::kDouble); to write into it, write into that and .copy_() it";

  static bool has_value(const at::Tensor& tensor) { return tensor.defined(); }

  static spans elements(const at::Tensor& tensor) {
    require_defined(tensor);
    if (!tensor.device().is_cpu())
      detail::raise(std::invalid_argument("torch tensor is not on the CPU: call .cpu()"));
    return dense(tensor);
  }

  /// In the memory of a CUDA device; of which one, on_stream asks CUDA.
  static spans device_elements(const at::Tensor& tensor) {
    require_defined(tensor);
    if (!tensor.device().is_cuda()) {
      detail::raise(std::invalid_argument("torch tensor is on " + tensor.device().str() +
                                          ", where a CUDA device's is wanted: call .cuda()"));
    }
    return dense(tensor);
  }

 private:
  static void require_defined(const at::Tensor& tensor) {
    if (tensor.defined()) return;
    detail::raise(std::invalid_argument("torch tensor is undefined (no gradient was computed?)"));
  }

  static spans dense(const at::Tensor& tensor) {
    // A sparse tensor has no strides to be asked for.
    if (tensor.layout() != at::kStrided) {
      detail::raise(std::invalid_argument("torch tensor is not dense (sparse or MKL-DNN): call .to_dense()"));
    }
    if (!tensor.is_contiguous()) {
      detail::raise(std::invalid_argument(
          "torch tensor is not contiguous: call .contiguous(); to write into it, write into a "
          "contiguous one and .copy_() that"));
    }
    // Its memory holds the values with the other sign.
    if (tensor.is_neg())
      detail::raise(std::invalid_argument("torch tensor is lazily negated: call .resolve_neg()"));

    const auto count = static_cast<std::size_t>(tensor.numel());
    switch (tensor.scalar_type()) {
      case at::kFloat:
        return std::span(tensor.data_ptr<float>(), count);
      case at::kDouble:
        return std::span(tensor.data_ptr<double>(), count);
      // The same bits as c10::Half and c10::BFloat16.
      case at::kHalf:
        return std::span(static_cast<lamina::float16*>(tensor.data_ptr()), count);
      case at::kBFloat16:
        return std::span(static_cast<lamina::bfloat16*>(tensor.data_ptr()), count);
      default:
        detail::raise(
            std::invalid_argument(std::string("torch tensor holds ") + at::toString(tensor.scalar_type()) +
                                  ", not float, double, Half or BFloat16: call .to(torch::kFloat)"));
    }
  }
};

namespace lamina::inline LAMINA_ABI {

/// The layer of a named torch tensor: its name and shape. Throws std::invalid_argument, naming it, for an
/// undefined tensor.
inline layer layer_of(std::string name, const at::Tensor& tensor) {
  if (!tensor.defined())
    detail::raise(std::invalid_argument("layer '" + name + "': the torch tensor is undefined"));
  return {std::move(name), {tensor.sizes().begin(), tensor.sizes().end()}};
}

/// The model that a torch::nn::Module is: a layer for each parameter, by torch's name for it, in the order of module.parameters().
/// Takes a module or what holds one, such as torch::nn::Linear. Throws std::invalid_argument for an undefined parameter.
template <class Module>
[[nodiscard]] layout layout_of(const Module& module) {
  if constexpr (requires { module->named_parameters(); }) {
    return layout_of(*module);
  } else {
    std::vector<layer> layers;
    for (const auto& each : module.named_parameters()) layers.push_back(layer_of(each.key(), each.value()));
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

/// The parameters of a server whose layers are cut: a tensor of one dimension for each of cut.fragments(), which shares the parameter's
/// memory and is not known to autograd. An optimizer of torch over these updates exactly what has arrived, since it passes over a tensor
/// without a gradient; over whole parameters, momentum would also move what no worker is told of.
///
/// \throws std::invalid_argument  another number of parameters than layers, or one of another size, or one that is not contiguous
[[nodiscard]] inline std::vector<at::Tensor> fragments_of(const std::vector<at::Tensor>& parameters,
                                                          const tiling& cut) {
  cut.model().check_count(parameters.size(), "parameters");
  std::vector<at::Tensor> parts;
  for (std::size_t layer = 0; layer < parameters.size(); ++layer) {
    if (!parameters[layer].defined() || !parameters[layer].is_contiguous()) {
      detail::raise(std::invalid_argument("layer '" + cut.model()[layer].name +
                                          "': the torch tensor is undefined or not contiguous"));
    }
    const at::Tensor flat = parameters[layer].detach().view({-1});
    cut.model().check_size(layer, static_cast<std::size_t>(flat.numel()));
    for (std::size_t part = cut.first(layer); part < cut.first(layer + 1); ++part) {
      parts.push_back(flat.narrow(0, static_cast<std::int64_t>(cut.begin(part)),
                                  static_cast<std::int64_t>(cut.fragments().sizes()[part])));
    }
  }
  return parts;
}

}  // namespace lamina::inline LAMINA_ABI
