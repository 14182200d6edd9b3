// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/modules/batchnorm.h>

#include <ostream>
#include <stdexcept>

namespace lab {

/// torch::nn::BatchNorm2d in all but its type. libtorch keeps a function of that one to itself, so that nothing can be derived from it, as
/// a gate is.
class batch_norm_impl : public torch::nn::BatchNormImplBase<2, batch_norm_impl> {
 public:
  using torch::nn::BatchNormImplBase<2, batch_norm_impl>::BatchNormImplBase;

 private:
  void _check_input_dim(const torch::Tensor& input) override {
    if (input.dim() != 4) throw std::invalid_argument("batch normalisation needs N x C x height x width");
  }
};

}  // namespace lab

template <>
inline void torch::nn::BatchNormImplBase<2, lab::batch_norm_impl>::pretty_print(
    std::ostream& stream) const {
  stream << "batch_norm(" << options.num_features() << ")";
}
