// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace lab {

/// Five times an image is halved.
inline constexpr std::int64_t vgg16_least_pixels = 32;

/// VGG-16 (Simonyan and Zisserman, arXiv:1409.1556, configuration D): thirteen 3x3 convolutions and three fully connected layers, without
/// batch normalisation. Parameters have the names that torchvision gives them, such as "classifier.0.weight"; with 1,000 classes they are
/// 32 tensors of 138,357,544 elements in all, of which the fully connected layers have 123,642,856.
///
/// There is no dropout between the fully connected layers: a step is then a function of its parameters and images alone, on every rank and
/// after a checkpoint, and P workers compute the gradient that one would of all their images.
class vgg16_impl : public torch::nn::Module {
 public:
  /// Draws the initial parameters from torch's default generator, as torchvision does: He-normal convolutions, fully connected weights of
  /// deviation 0.01, biases of 0.
  explicit vgg16_impl(std::int64_t classes);

  /// Takes `images` of N x 3 x height x width, of at least vgg16_least_pixels a side, and returns logits of N x classes, both float32.
  torch::Tensor forward(const torch::Tensor& images);

 private:
  torch::nn::Sequential features_, classifier_;
};

TORCH_MODULE_IMPL(vgg16, vgg16_impl);

}  // namespace lab
