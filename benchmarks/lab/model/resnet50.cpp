// SPDX-License-Identifier: MIT
#include "model/resnet50.hpp"

#include <torch/enum.h>
#include <torch/nn/init.h>

namespace lab {
namespace {

using convolution_layer = lamina::collectives::gated<torch::nn::Conv2dImpl>;
using normalisation_layer = lamina::collectives::gated<batch_norm_impl>;

constexpr std::int64_t bottleneck_expansion = 4;

const lamina::collectives::gate open_gate;

convolution_layer convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  auto options = torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false);
  convolution_layer layer(open_gate, options);
  torch::nn::init::kaiming_normal_(layer->weight, 0, torch::kFanOut, torch::kReLU);
  return layer;
}

class bottleneck_impl : public torch::nn::Module {
 public:
  bottleneck_impl(std::int64_t in, std::int64_t width, std::int64_t stride)
      : conv1_(register_module("conv1", convolution(in, width, 1, stride))),
        bn1_(register_module("bn1", normalisation_layer(open_gate, width))),
        conv2_(register_module("conv2", convolution(width, width, 3, 1))),
        bn2_(register_module("bn2", normalisation_layer(open_gate, width))),
        conv3_(register_module("conv3", convolution(width, width * bottleneck_expansion, 1, 1))),
        bn3_(register_module("bn3", normalisation_layer(open_gate, width * bottleneck_expansion))) {
    // A block begins as its shortcut: else the loss rises at first (Goyal et al. 2017, section 5.1).
    torch::nn::init::zeros_(bn3_->weight);
    const std::int64_t out = width * bottleneck_expansion;
    if (stride == 1 && in == out) return;
    downsample_ = register_module("downsample", torch::nn::Sequential(convolution(in, out, 1, stride),
                                                                      normalisation_layer(open_gate, out)));
  }

  torch::Tensor forward(torch::Tensor x) {
    const torch::Tensor shortcut = downsample_.is_empty() ? x : downsample_->forward(x);
    x = bn1_(conv1_(x)).relu_();
    x = bn2_(conv2_(x)).relu_();
    x = bn3_(conv3_(x));
    return x.add_(shortcut).relu_();
  }

 private:
  convolution_layer conv1_;
  normalisation_layer bn1_;
  convolution_layer conv2_;
  normalisation_layer bn2_;
  convolution_layer conv3_;
  normalisation_layer bn3_;
  torch::nn::Sequential downsample_ = nullptr;
};

TORCH_MODULE_IMPL(bottleneck, bottleneck_impl);

torch::nn::Sequential stage(std::int64_t in, std::int64_t width, std::int64_t blocks, std::int64_t stride) {
  torch::nn::Sequential layer(bottleneck(in, width, stride));
  for (std::int64_t i = 1; i < blocks; ++i) {
    layer->push_back(bottleneck(width * bottleneck_expansion, width, 1));
  }
  return layer;
}

convolution_layer first_convolution(stem kind) {
  return kind == stem::standard ? convolution(3, 64, 7, 2) : convolution(3, 64, 3, 1);
}

}  // namespace

resnet50_impl::resnet50_impl(model_options options)
    : stem_(options.stem),
      conv1_(register_module("conv1", first_convolution(options.stem))),
      bn1_(register_module("bn1", normalisation_layer(open_gate, 64))),
      layer1_(register_module("layer1", stage(64, 64, 3, 1))),
      layer2_(register_module("layer2", stage(256, 128, 4, 2))),
      layer3_(register_module("layer3", stage(512, 256, 6, 2))),
      layer4_(register_module("layer4", stage(1024, 512, 3, 2))),
      fc_(register_module(
          "fc", lamina::collectives::gated<torch::nn::LinearImpl>(open_gate, 2048, options.classes))) {}

torch::Tensor resnet50_impl::forward(torch::Tensor images) {
  torch::Tensor x = bn1_(conv1_(images)).relu_();
  if (stem_ == stem::standard) x = torch::max_pool2d(x, 3, 2, 1);
  x = layer1_->forward(x);
  x = layer2_->forward(x);
  x = layer3_->forward(x);
  x = layer4_->forward(x);
  return fc_(x.mean({2, 3}));
}

}  // namespace lab
