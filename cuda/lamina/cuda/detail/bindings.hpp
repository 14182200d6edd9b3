// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory_resource>
#include <ranges>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "lamina/cuda/detail/memory.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/cuda/device_tensor.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Writes the table of pointers, which come as the arguments of a launch: their copy waits for nothing.
struct bind_kernel {
  static constexpr unsigned threads = 256;
  static constexpr unsigned thread_blocks_at_once = 1;
  static constexpr std::size_t most_layers = 224;  // of a launch
  struct shared_memory {};

  tensor_view* table;                  // a fragment each
  const std::size_t* first_fragments;  // of these layers, and of the next
  std::size_t fragment_elements;       // but for a layer's last
  std::size_t layers;
  tensor_view tensors[most_layers];

  std::size_t thread_blocks(unsigned) const { return 1; }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void operator()(const ThreadBlock& cta, shared_memory&) const {
    cta.wait_for_launches();
    for (std::size_t layer = cta.thread(); layer < layers; layer += cta.threads()) {
      const tensor_view tensor = tensors[layer];
      const std::size_t first = first_fragments[layer];
      for (std::size_t f = first; f < first_fragments[layer + 1]; ++f) {
        const std::size_t begin = (f - first) * fragment_elements * element_bytes(tensor.type);
        table[f] = {static_cast<std::byte*>(tensor.data) + begin, tensor.type};
      }
    }
  }
};
static_assert(sizeof(bind_kernel) <= 4096, "what the arguments of a launch may have on every GPU");

/// Where the tensors of a model's layers are, checked, as a table in device memory.
template <element T>
class bindings {
 public:
  bindings(const tiling& cut, std::pmr::memory_resource* memory) : cut_(cut), memory_(memory) {
    std::vector<std::size_t> first;
    for (std::size_t l = 0; l <= cut.model().layers(); ++l) first.push_back(cut.first(l));
    first_fragments_ = memory_.copy_of(first, "tables");
    views_ = memory_.filled(cut.fragments().layers(), tensor_view{}, "the table of pointers");
  }

  template <class Execution, std::ranges::random_access_range Tensors>
  requires std::ranges::sized_range<Tensors>
  void bind(const Execution& execution, Tensors& tensors) {
    execution.require_current_device();
    execution.require_no_capture("bind");
    const layout& model = cut_.model();
    const auto count = static_cast<std::size_t>(std::ranges::size(tensors));
    model.check_count(count, "tensors");
    std::vector<tensor_view> views;
    bool are_writable = true;
    for (auto&& given : tensors) {
      const device_tensor tensor = checked(execution, views.size(), given);
      are_writable = are_writable && tensor.is_writable() && tensor.type() == device_element_of<T>::value;
      views.push_back({tensor.data(), tensor.type()});
    }
    execution.require_device_memory(views_, "the tables");
    is_bound_ = false;  // until the last of the launches
    bind_kernel kernel{views_, nullptr, cut_.fragment_elements(), 0, {}};
    for (std::size_t first = 0; first < count; first += kernel.layers) {
      kernel.first_fragments = first_fragments_ + first;
      kernel.layers = (std::min)(count - first, bind_kernel::most_layers);
      std::copy_n(views.begin() + static_cast<std::ptrdiff_t>(first), kernel.layers, kernel.tensors);
      execution.run(kernel);
    }
    are_writable_ = are_writable;
    is_bound_ = true;
  }

  /// Throws std::logic_error before the first bind().
  const tensor_view* views(const char* call) const {
    if (!is_bound_) throw std::logic_error(std::string(call) + ": no tensors are bound; call bind() before");
    return views_;
  }
  /// Whether all are of T and not const.
  bool are_writable() const noexcept { return are_writable_; }

 private:
  // With the layer's name in whatever is wrong with it.
  template <class Execution, class Tensor>
  device_tensor checked(const Execution& execution, std::size_t layer, Tensor& given) const {
    const std::string& name = cut_.model()[layer].name;
    if constexpr (requires { tensor_traits<std::remove_const_t<Tensor>>::has_value(given); }) {
      if (!tensor_traits<std::remove_const_t<Tensor>>::has_value(given))
        throw std::invalid_argument("layer '" + name + "' has no gradient; on the device bind zeros for it");
    }
    device_tensor tensor;
    try {
      tensor = device_tensor(given);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("layer '" + name + "': " + error.what());
    }
    cut_.model().check_size(layer, tensor.elements());
    if (element_bytes(tensor.type()) > 2 && tensor.type() != device_element_of<T>::value)
      throw std::invalid_argument("the tensor of layer '" + name +
                                  "' is neither of the residual's type nor half-width");
    if (tensor.elements() > 0) execution.require_device_memory(tensor.data(), name.c_str());
    return tensor;
  }

  tiling cut_;
  device_memory memory_;
  tensor_view* views_;
  const std::size_t* first_fragments_;
  bool is_bound_ = false;
  bool are_writable_ = false;
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
