// SPDX-License-Identifier: MIT
#include <torch/optim/sgd.h>  // Torch defines CHECK, so its headers come before Catch2's.

#include "catch.hpp"

#include <cstdint>
#include <lamina/layout.hpp>
#include <vector>

#include "model/optimizer.hpp"

namespace {

TEST_CASE("20 steps of SGD are torch's, for each combination of the options") {
  const float momentum = GENERATE(0.0F, 0.9F);
  const float weight_decay = GENERATE(0.0F, 0.05F);
  const bool nesterov = GENERATE(false, true);
  if (nesterov && momentum == 0) return;  // neither knows it
  CAPTURE(momentum, weight_decay, nesterov);

  constexpr std::size_t elements = 103;
  constexpr float rate = 0.1F;
  torch::manual_seed(1);
  torch::Tensor theirs = torch::randn({elements}).requires_grad_();
  std::vector<float> ours(theirs.data_ptr<float>(), theirs.data_ptr<float>() + elements);
  torch::optim::SGD reference(
      {theirs},
      torch::optim::SGDOptions(rate).momentum(momentum).weight_decay(weight_decay).nesterov(nesterov));
  lab::sgd optimizer(lamina::layout({{"layer", {elements}}}),
                             {rate, momentum, weight_decay, nesterov});

  for (int step = 1; step <= 20; ++step) {
    if (step == 11) {
      optimizer.set_learning_rate(rate / 4);
      static_cast<torch::optim::SGDOptions&>(reference.param_groups()[0].options()).lr(rate / 4);
    }
    const torch::Tensor gradient = torch::randn({elements});
    theirs.mutable_grad() = gradient.clone();
    reference.step();
    optimizer.update(0, 0, {gradient.data_ptr<float>(), elements}, ours);
    for (std::size_t i = 0; i < elements; ++i) {
      CAPTURE(step, i);
      REQUIRE(ours[i] == Approx(theirs.data_ptr<float>()[i]).epsilon(1e-6).margin(1e-6));
    }
  }
}

}  // namespace
