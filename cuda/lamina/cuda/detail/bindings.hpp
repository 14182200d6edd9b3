// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>

#include <cstddef>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/cuda/detail/device_array.hpp"
#include "lamina/cuda/detail/staging.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/cuda/device_tensor.hpp"
#include "lamina/cuda/memory_resource.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"
#include "lamina/partition.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Where the tensors of a model's layers are, checked, as a table in device memory.
template <element T>
class bindings {
 public:
  explicit bindings(const partition& cut, memory_resource* memory = nullptr)
      : partition_(cut), views_(memory, "the table of pointers") {
    views_.resize(cut.parts().layers());
  }

  /// As gradient_compressor::bind.
  template <class Execution, std::ranges::random_access_range Tensors>
  requires std::ranges::sized_range<Tensors>
  void bind(const Execution& execution, Tensors& tensors) {
    execution.require_no_capture("bind");
    const layout& model = partition_.model();
    const auto count = static_cast<std::size_t>(std::ranges::size(tensors));
    if (count != model.layers()) {
      throw std::invalid_argument("the model has " + std::to_string(model.layers()) + " layers, got " +
                                  std::to_string(count) + " tensors");
    }
    std::vector<tensor_view> views;
    views.reserve(views_.size());
    bool are_writable = true;
    using index = std::ranges::range_difference_t<Tensors>;
    for (std::size_t l = 0; l < count; ++l) {
      auto&& given = std::ranges::begin(tensors)[static_cast<index>(l)];
      require_value(l, given);
      const device_tensor tensor = tensor_of(l, given);
      require(execution, l, tensor);
      are_writable = are_writable && tensor.is_writable() && tensor.type() == device_element_of<T>::value;
      for (std::size_t part = partition_.first(l); part < partition_.first(l + 1); ++part) {
        const auto piece = tensor.part(partition_.begin(part), partition_.parts().sizes()[part]);
        views.push_back({piece.data(), piece.type()});
      }
    }
    execution.require_device_memory(views_.data().get(), "the tables");
    ring_.copy(execution, std::span<const tensor_view>(views), views_.data().get());
    are_writable_ = are_writable;
    is_bound_ = true;
  }

  /// Throws std::logic_error before the first bind().
  const tensor_view* views(const char* call) const {
    if (!is_bound_) throw std::logic_error(std::string(call) + ": no tensors are bound; call bind() before");
    return views_.data().get();
  }
  /// Whether all are of T and not const.
  bool are_writable() const noexcept { return are_writable_; }

 private:
  // With the layer's name in what its traits throw.
  template <class Tensor>
  device_tensor tensor_of(std::size_t layer, Tensor& tensor) const {
    try {
      return device_tensor(tensor);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("layer '" + partition_.model()[layer].name + "': " + error.what());
    }
  }

  template <class Tensor>
  void require_value(std::size_t layer, const Tensor& tensor) const {
    if constexpr (requires { tensor_traits<Tensor>::has_value(tensor); }) {
      if (tensor_traits<Tensor>::has_value(tensor)) return;
      throw std::invalid_argument("layer '" + partition_.model()[layer].name +
                                  "' has no gradient; on the device bind zeros for it");
    }
  }

  template <class Execution>
  void require(const Execution& execution, std::size_t layer, const device_tensor& tensor) const {
    const std::string& name = partition_.model()[layer].name;
    partition_.model().check_size(layer, tensor.elements());
    const bool is_half =
        tensor.type() == device_element::float16 || tensor.type() == device_element::bfloat16;
    if (!is_half && tensor.type() != device_element_of<T>::value) {
      throw std::invalid_argument("the tensor of layer '" + name +
                                  "' is neither of the residual's type nor half-width");
    }
    if (tensor.elements() > 0) execution.require_device_memory(tensor.data(), name.c_str());
  }

  partition partition_;
  device_array<tensor_view> views_;
  staging_ring ring_;
  bool is_bound_ = false;
  bool are_writable_ = false;
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
