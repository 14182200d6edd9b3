// SPDX-License-Identifier: MIT
#include "model/vgg.hpp"

#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <array>
#include <lamina/collectives/torch_hooks.hpp>

namespace lab {
namespace {

namespace collectives = lamina::collectives;

constexpr std::int64_t pooling = 0;  // among the widths of the convolutions
constexpr std::array<std::int64_t, 18> widths = {64,  64,      pooling, 128,     128, pooling,
                                                 256, 256,     256,     pooling, 512, 512,
                                                 512, pooling, 512,     512,     512, pooling};
constexpr std::int64_t side = 7;  // of the image that the fully connected layers see
constexpr std::int64_t hidden = 4096;

const collectives::gate opens_at_once;

torch::nn::ReLU rectifier() {
  return torch::nn::ReLU(torch::nn::ReLUOptions(/*inplace=*/true));
}

torch::nn::Sequential convolutions() {
  torch::nn::Sequential layers;
  std::int64_t in = 3;
  for (const std::int64_t width : widths) {
    if (width == pooling) {
      layers->push_back(torch::nn::MaxPool2d(2));
      continue;
    }
    collectives::gated<torch::nn::Conv2dImpl> layer(opens_at_once,
                                                    torch::nn::Conv2dOptions(in, width, 3).padding(1));
    torch::nn::init::kaiming_normal_(layer->weight, 0, torch::kFanOut, torch::kReLU);
    torch::nn::init::zeros_(layer->bias);
    layers->push_back(layer);
    layers->push_back(rectifier());
    in = width;
  }
  return layers;
}

collectives::gated<torch::nn::LinearImpl> linear(std::int64_t in, std::int64_t out) {
  collectives::gated<torch::nn::LinearImpl> layer(opens_at_once, in, out);
  torch::nn::init::normal_(layer->weight, 0, 0.01);
  torch::nn::init::zeros_(layer->bias);
  return layer;
}

// In place of torchvision's dropout, so that layers have the same numbers.
torch::nn::Identity no_dropout() {
  return torch::nn::Identity();
}

}  // namespace

vgg16_impl::vgg16_impl(std::int64_t classes)
    : features_(register_module("features", convolutions())),
      classifier_(register_module(
          "classifier", torch::nn::Sequential(linear(512 * side * side, hidden), rectifier(), no_dropout(),
                                              linear(hidden, hidden), rectifier(), no_dropout(),
                                              linear(hidden, classes)))) {}

torch::Tensor vgg16_impl::forward(const torch::Tensor& images) {
  const torch::Tensor seen = torch::adaptive_avg_pool2d(features_->forward(images), {side, side});
  return classifier_->forward(seen.flatten(1));
}

}  // namespace lab
