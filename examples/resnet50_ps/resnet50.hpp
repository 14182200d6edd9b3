// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

/// ResNet-50 v1 (He et al. 2015, arXiv:1512.03385): 161 parameters.
class resnet50 : public torch::nn::Module {
 public:
  explicit resnet50(std::int64_t classes) {
    features_->push_back(convolution(3, 64, 7, 2));
    features_->push_back(torch::nn::BatchNorm2d(64));
    features_->push_back(relu());
    features_->push_back(torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2).padding(1)));
    std::int64_t channels = 64;
    for (const auto& [width, blocks, stride] : {stage{64, 3, 1}, stage{128, 4, 2}, stage{256, 6, 2}, stage{512, 3, 2}}) {
      for (int i = 0; i < blocks; ++i) {
        features_->push_back(std::make_shared<bottleneck>(channels, width, i == 0 ? stride : 1));
        channels = 4 * width;
      }
    }
    register_module("features", features_);
    register_module("fc", fc_ = torch::nn::Linear(channels, classes));
  }

  /// N x 3 x height x width, of about zero mean and unit variance, to N x classes scores.
  torch::Tensor forward(const torch::Tensor& images) { return fc_(features_->forward(images).mean({2, 3})); }

 private:
  struct stage {
    std::int64_t width;
    int blocks;
    std::int64_t stride;
  };

  static torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
    torch::nn::Conv2d layer(torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
    torch::nn::init::kaiming_normal_(layer->weight, 0, torch::kFanOut, torch::kReLU);
    return layer;
  }
  static torch::nn::ReLU relu() { return torch::nn::ReLU(torch::nn::ReLUOptions(/*inplace=*/true)); }

  // 1 x 1 to `width` channels, 3 x 3, and 1 x 1 to four times `width`; added to the shortcut.
  struct bottleneck : torch::nn::Module {
    bottleneck(std::int64_t in, std::int64_t width, std::int64_t stride) {
      torch::nn::BatchNorm2d last(4 * width);
      torch::nn::init::zeros_(last->weight);  // a block begins as its shortcut (Goyal et al. 2017, section 5.1)
      body =
          torch::nn::Sequential(convolution(in, width, 1, stride), torch::nn::BatchNorm2d(width), relu(), convolution(width, width, 3, 1),
                                torch::nn::BatchNorm2d(width), relu(), convolution(width, 4 * width, 1, 1), last);
      register_module("body", body);
      if (stride == 1 && in == 4 * width) return;
      shortcut = torch::nn::Sequential(convolution(in, 4 * width, 1, stride), torch::nn::BatchNorm2d(4 * width));
      register_module("shortcut", shortcut);
    }
    torch::Tensor forward(const torch::Tensor& in) {
      return body->forward(in).add_(shortcut.is_empty() ? in : shortcut->forward(in)).relu_();
    }
    torch::nn::Sequential body = nullptr, shortcut = nullptr;
  };

  torch::nn::Sequential features_;
  torch::nn::Linear fc_ = nullptr;
};
