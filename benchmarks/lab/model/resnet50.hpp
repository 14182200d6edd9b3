// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <lamina/collectives/torch_hooks.hpp>

#include "model/batch_norm.hpp"

namespace lab {

/// The first layers of the network, before the residual blocks.
enum class stem {
  standard,  ///< 7x7 convolution of stride 2 and max pooling, as published for ImageNet.
  small,     ///< 3x3 convolution of stride 1 and no pooling, for images of about 32 pixels.
};

struct model_options {
  std::int64_t classes = 1000;
  lab::stem stem = lab::stem::standard;
};

/// ResNet-50 v1 (He et al., arXiv:1512.03385): a bottleneck that halves the image does so in its first 1x1
/// convolution. Parameters have the names that torchvision gives them, such as "layer1.0.conv1.weight"; with
/// 1,000 classes and the standard stem they are 161 tensors of 25,557,032 elements in all. Every module that has parameters
/// has a gate (lamina/collectives/torch_hooks.hpp), which is open unless somebody sets it.
class resnet50_impl : public torch::nn::Module {
 public:
  /// Draws the initial parameters from torch's default generator.
  explicit resnet50_impl(model_options options);

  /// Takes `images` of N x 3 x height x width and returns logits of N x classes, both float32.
  torch::Tensor forward(torch::Tensor images);

 private:
  stem stem_;
  lamina::collectives::gated<torch::nn::Conv2dImpl> conv1_;
  lamina::collectives::gated<batch_norm_impl> bn1_;
  torch::nn::Sequential layer1_, layer2_, layer3_, layer4_;
  lamina::collectives::gated<torch::nn::LinearImpl> fc_;
};

TORCH_MODULE_IMPL(resnet50, resnet50_impl);

}  // namespace lab
