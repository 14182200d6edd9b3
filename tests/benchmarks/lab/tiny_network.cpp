// SPDX-License-Identifier: MIT
// Linked into the program in place of ResNet-50 where a test kills, stops and resumes it, or has it fail as planned: a step takes a while, as that of a
// large network does, and no processor.
#include <torch/nn/modules/activation.h>

#include <chrono>
#include <lamina/collectives/torch_hooks.hpp>

#include "model/batch_norm.hpp"
#include "model/network.hpp"
#include "planned_fault.hpp"

namespace lab {
namespace {

using lamina::collectives::gated;
using gated_linear = gated<torch::nn::LinearImpl>;

const lamina::collectives::gate open_gate;

class tiny_network_impl : public torch::nn::Module {
 public:
  explicit tiny_network_impl(std::int64_t classes)
      : conv1_(register_module("conv1", gated<torch::nn::Conv2dImpl>(
                                            open_gate, torch::nn::Conv2dOptions(3, 16, 3).bias(false)))),
        bn1_(register_module("bn1", gated<batch_norm_impl>(open_gate, 16))),
        hidden_(register_module("hidden", torch::nn::Sequential())),
        fc_(register_module("fc", gated_linear(open_gate, 64, classes))) {
    for (int layer = 0; layer < 8; ++layer) {
      hidden_->push_back(gated_linear(open_gate, 64, 64));
      hidden_->push_back(torch::nn::ReLU());
    }
  }

  torch::Tensor forward(torch::Tensor images) {
    constexpr std::chrono::milliseconds sleeps(200);
    if (is_training()) fault_.forward(sleeps);
    const torch::Tensor first = conv1_(images);
    if (first.requires_grad())
      first.register_hook([this, sleeps](const torch::Tensor&) { fault_.backward(sleeps); });
    const torch::Tensor features = bn1_(first).relu_();
    return fc_(hidden_->forward(torch::adaptive_avg_pool2d(features, {2, 2}).flatten(1)));
  }

 private:
  gated<torch::nn::Conv2dImpl> conv1_;
  gated<batch_norm_impl> bn1_;
  torch::nn::Sequential hidden_;
  gated_linear fc_;
  planned_fault fault_;
};

TORCH_MODULE_IMPL(tiny_network, tiny_network_impl);

}  // namespace

torch::nn::AnyModule make_network(const std::string&, model_options options) {
  return torch::nn::AnyModule(tiny_network(options.classes));
}

}  // namespace lab
