// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>

/// ResNet-50 v1 (He et al. 2015, arXiv:1512.03385): 161 parameters, named as torchvision's.
class resnet50 : public torch::nn::Module {
 public:
  explicit resnet50(std::int64_t classes) {
    layer1_ = stage("layer1", 64, 64, 3, 1);
    layer2_ = stage("layer2", 256, 128, 4, 2);
    layer3_ = stage("layer3", 512, 256, 6, 2);
    layer4_ = stage("layer4", 1024, 512, 3, 2);
    fc_ = register_module("fc", torch::nn::Linear(2048, classes));
  }

  /// \param images  N x 3 x height x width, of about zero mean and unit variance
  /// \return        N x classes scores
  torch::Tensor forward(const torch::Tensor& images) {
    torch::Tensor x = torch::max_pool2d(bn1_(conv1_(images)).relu_(), 3, 2, 1);
    x = layer4_->forward(layer3_->forward(layer2_->forward(layer1_->forward(x))));
    return fc_(x.mean({2, 3}));
  }

 private:
  static torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel,
                                       std::int64_t stride) {
    torch::nn::Conv2d layer(
        torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
    torch::nn::init::kaiming_normal_(layer->weight, 0, torch::kFanOut, torch::kReLU);
    return layer;
  }

  // 1 x 1 to `width` channels, 3 x 3, and 1 x 1 to four times `width`, added to the shortcut.
  struct bottleneck : torch::nn::Module {
    bottleneck(std::int64_t in, std::int64_t width, std::int64_t stride) {
      register_module("conv1", conv1 = convolution(in, width, 1, stride));
      register_module("bn1", bn1 = torch::nn::BatchNorm2d(width));
      register_module("conv2", conv2 = convolution(width, width, 3, 1));
      register_module("bn2", bn2 = torch::nn::BatchNorm2d(width));
      register_module("conv3", conv3 = convolution(width, 4 * width, 1, 1));
      register_module("bn3", bn3 = torch::nn::BatchNorm2d(4 * width));
      torch::nn::init::zeros_(
          bn3->weight);  // a block begins as its shortcut (Goyal et al. 2017, section 5.1)
      if (stride == 1 && in == 4 * width) return;
      downsample =
          torch::nn::Sequential(convolution(in, 4 * width, 1, stride), torch::nn::BatchNorm2d(4 * width));
      register_module("downsample", downsample);
    }
    torch::Tensor forward(const torch::Tensor& in) {
      torch::Tensor x = bn1(conv1(in)).relu_();
      x = bn3(conv3(bn2(conv2(x)).relu_()));
      return x.add_(downsample.is_empty() ? in : downsample->forward(in)).relu_();
    }
    torch::nn::Conv2d conv1 = nullptr, conv2 = nullptr, conv3 = nullptr;
    torch::nn::BatchNorm2d bn1 = nullptr, bn2 = nullptr, bn3 = nullptr;
    torch::nn::Sequential downsample = nullptr;
  };

  torch::nn::Sequential stage(const std::string& name, std::int64_t in, std::int64_t width, int blocks,
                              std::int64_t stride) {
    torch::nn::Sequential blocks_of_stage(std::make_shared<bottleneck>(in, width, stride));
    for (int i = 1; i < blocks; ++i)
      blocks_of_stage->push_back(std::make_shared<bottleneck>(4 * width, width, 1));
    return register_module(name, blocks_of_stage);
  }

  torch::nn::Conv2d conv1_ = register_module("conv1", convolution(3, 64, 7, 2));
  torch::nn::BatchNorm2d bn1_ = register_module("bn1", torch::nn::BatchNorm2d(64));
  torch::nn::Sequential layer1_ = nullptr, layer2_ = nullptr, layer3_ = nullptr, layer4_ = nullptr;
  torch::nn::Linear fc_ = nullptr;
};
