// SPDX-License-Identifier: MIT
#pragma once

#include <ranges>

#include "lamina/cuda/detail/accumulate.hpp"
#include "lamina/cuda/detail/bindings.hpp"
#include "lamina/cuda/detail/device_array.hpp"
#include "lamina/cuda/detail/device_layout.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"
#include "lamina/partition.hpp"
#include "lamina/representative.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

/// The representative values of many tensors on a device, without a residual: the bits that the functor gives on the
/// CPU. Elements that are not finite count as zero.
template <element T, representative F = mean_abs>
class layer_values {
 public:
  /// Allocates tables on the current device.
  explicit layer_values(const layout& model, F functor = {})
      : functor_(functor), tables_(model), tensors_(partition(model)) {
    values_.resize(model.layers());
  }

  /// The tensors, one a layer; as gradient_compressor::bind.
  template <class Execution, std::ranges::random_access_range Tensors>
  void bind(const Execution& execution, Tensors&& tensors) {
    tensors_.bind(execution, tensors);
  }
  /// One launch over all layers, one read of the tensors. Throws std::logic_error before the first bind().
  template <class Execution>
  void compute(const Execution& execution) {
    auto at = tables_.template view<T>();
    at.gradients = tensors_.views("compute");
    execution.run(detail::accumulate_kernel<T, F, detail::reduction_of::gradients, detail::nothing_more>{
        at, functor_, values(), {}});
  }
  /// q of each layer as of the last compute(): L in device memory.
  double* values() noexcept { return values_.data().get(); }

 private:
  F functor_;
  detail::device_layout tables_;
  detail::bindings<T> tensors_;
  detail::device_array<double> values_{nullptr, "values"};
};

}  // namespace lamina::inline LAMINA_ABI::cuda
