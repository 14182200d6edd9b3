// SPDX-License-Identifier: MIT
#include "networks.hpp"

#include <torch/torch.h>

#include <array>
#include <lamina/collectives/torch_hooks.hpp>
#include <ostream>
#include <stdexcept>

namespace lab {

// torch::nn::BatchNorm2d in all but its type. libtorch keeps a function of that one private, so that nothing can be derived from it, as a
// gate is.
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
inline void torch::nn::BatchNormImplBase<2, lab::batch_norm_impl>::pretty_print(std::ostream& stream) const {
  stream << "batch_norm(" << options.num_features() << ")";
}

namespace lab {
namespace {

using convolution_layer = lamina::collectives::gated<torch::nn::Conv2dImpl>;
using normalisation_layer = lamina::collectives::gated<batch_norm_impl>;
using linear_layer = lamina::collectives::gated<torch::nn::LinearImpl>;
using torch::nn::Sequential;

const lamina::collectives::gate open_gate;

convolution_layer convolution(torch::nn::Conv2dOptions options) {
  convolution_layer layer(open_gate, options);
  torch::nn::init::kaiming_normal_(layer->weight, 0, torch::kFanOut, torch::kReLU);
  if (layer->bias.defined()) torch::nn::init::zeros_(layer->bias);
  return layer;
}

convolution_layer convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  return convolution(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

torch::nn::ReLU rectifier() {
  return torch::nn::ReLU(torch::nn::ReLUOptions(/*inplace=*/true));
}

class bottleneck_impl : public torch::nn::Module {
 public:
  static constexpr std::int64_t expansion = 4;

  bottleneck_impl(std::int64_t in, std::int64_t width, std::int64_t stride)
      : conv1_(register_module("conv1", convolution(in, width, 1, stride))),
        bn1_(register_module("bn1", normalisation_layer(open_gate, width))),
        conv2_(register_module("conv2", convolution(width, width, 3, 1))),
        bn2_(register_module("bn2", normalisation_layer(open_gate, width))),
        conv3_(register_module("conv3", convolution(width, width * expansion, 1, 1))),
        bn3_(register_module("bn3", normalisation_layer(open_gate, width * expansion))) {
    // A block begins as its shortcut: else the loss rises at first (Goyal et al. 2017, section 5.1).
    torch::nn::init::zeros_(bn3_->weight);
    const std::int64_t out = width * expansion;
    if (stride == 1 && in == out) return;
    downsample_ = register_module(
        "downsample", Sequential(convolution(in, out, 1, stride), normalisation_layer(open_gate, out)));
  }

  torch::Tensor forward(torch::Tensor x) {
    const torch::Tensor shortcut = downsample_.is_empty() ? x : downsample_->forward(x);
    x = bn1_(conv1_(x)).relu_();
    x = bn2_(conv2_(x)).relu_();
    return bn3_(conv3_(x)).add_(shortcut).relu_();
  }

 private:
  convolution_layer conv1_;
  normalisation_layer bn1_;
  convolution_layer conv2_;
  normalisation_layer bn2_;
  convolution_layer conv3_;
  normalisation_layer bn3_;
  Sequential downsample_ = nullptr;
};
TORCH_MODULE_IMPL(bottleneck, bottleneck_impl);

Sequential stage(std::int64_t in, std::int64_t width, std::int64_t blocks, std::int64_t stride) {
  Sequential layer(bottleneck(in, width, stride));
  for (std::int64_t i = 1; i < blocks; ++i)
    layer->push_back(bottleneck(width * bottleneck_impl::expansion, width, 1));
  return layer;
}

class resnet50_impl : public torch::nn::Module {
 public:
  explicit resnet50_impl(std::int64_t classes)
      : conv1_(register_module("conv1", convolution(3, 64, 7, 2))),
        bn1_(register_module("bn1", normalisation_layer(open_gate, 64))),
        layer1_(register_module("layer1", stage(64, 64, 3, 1))),
        layer2_(register_module("layer2", stage(256, 128, 4, 2))),
        layer3_(register_module("layer3", stage(512, 256, 6, 2))),
        layer4_(register_module("layer4", stage(1024, 512, 3, 2))),
        fc_(register_module("fc", linear_layer(open_gate, 2048, classes))) {}

  torch::Tensor forward(torch::Tensor images) {
    torch::Tensor x = torch::max_pool2d(bn1_(conv1_(images)).relu_(), 3, 2, 1);
    x = layer2_->forward(layer1_->forward(x));
    x = layer4_->forward(layer3_->forward(x));
    return fc_(x.mean({2, 3}));
  }

 private:
  convolution_layer conv1_;
  normalisation_layer bn1_;
  Sequential layer1_, layer2_, layer3_, layer4_;
  linear_layer fc_;
};
TORCH_MODULE_IMPL(resnet50, resnet50_impl);

class vgg16_impl : public torch::nn::Module {
 public:
  explicit vgg16_impl(std::int64_t classes)
      : features_(register_module("features", convolutions())),
        classifier_(register_module(
            "classifier",
            // Identity in place of torchvision's dropout, so that layers have the same numbers.
            Sequential(linear(512 * side * side, hidden), rectifier(), torch::nn::Identity(),
                       linear(hidden, hidden), rectifier(), torch::nn::Identity(),
                       linear(hidden, classes)))) {}

  torch::Tensor forward(const torch::Tensor& images) {
    return classifier_->forward(
        torch::adaptive_avg_pool2d(features_->forward(images), {side, side}).flatten(1));
  }

 private:
  static constexpr std::int64_t side = 7;  // of the image that the fully connected layers see
  static constexpr std::int64_t hidden = 4096;
  static constexpr std::int64_t pooling = 0;
  static constexpr std::array<std::int64_t, 18> widths = {64,  64,      pooling, 128,     128, pooling,
                                                          256, 256,     256,     pooling, 512, 512,
                                                          512, pooling, 512,     512,     512, pooling};

  static Sequential convolutions() {
    Sequential layers;
    std::int64_t in = 3;
    for (const std::int64_t width : widths) {
      if (width == pooling) {
        layers->push_back(torch::nn::MaxPool2d(2));
        continue;
      }
      layers->push_back(convolution(torch::nn::Conv2dOptions(in, width, 3).padding(1)));
      layers->push_back(rectifier());
      in = width;
    }
    return layers;
  }
  static linear_layer linear(std::int64_t in, std::int64_t out) {
    linear_layer layer(open_gate, in, out);
    torch::nn::init::normal_(layer->weight, 0, 0.01);
    torch::nn::init::zeros_(layer->bias);
    return layer;
  }

  Sequential features_;
  Sequential classifier_;
};
TORCH_MODULE_IMPL(vgg16, vgg16_impl);

class tiny_impl : public torch::nn::Module {
 public:
  explicit tiny_impl(std::int64_t classes)
      : conv1_(register_module("conv1", convolution(3, 16, 3, 1))),
        bn1_(register_module("bn1", normalisation_layer(open_gate, 16))),
        hidden_(register_module("hidden", Sequential())),
        fc_(register_module("fc", linear_layer(open_gate, 64, classes))) {
    for (int layer = 0; layer < 8; ++layer) {
      hidden_->push_back(linear_layer(open_gate, 64, 64));
      hidden_->push_back(torch::nn::ReLU());
    }
  }

  torch::Tensor forward(const torch::Tensor& images) {
    const torch::Tensor features = bn1_(conv1_(images)).relu_();
    return fc_(hidden_->forward(torch::adaptive_avg_pool2d(features, {2, 2}).flatten(1)));
  }

 private:
  convolution_layer conv1_;
  normalisation_layer bn1_;
  Sequential hidden_;
  linear_layer fc_;
};
TORCH_MODULE_IMPL(tiny, tiny_impl);

}  // namespace

torch::nn::AnyModule make_network(const std::string& name, std::int64_t classes) {
  if (name == "resnet50") return torch::nn::AnyModule(resnet50(classes));
  if (name == "vgg16") return torch::nn::AnyModule(vgg16(classes));
  if (name == "tiny") return torch::nn::AnyModule(tiny(classes));
  throw std::invalid_argument("there is no network " + name);
}

}  // namespace lab
