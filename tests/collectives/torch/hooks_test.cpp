// SPDX-License-Identifier: MIT
// Torch first: its CHECK and Catch2's clash, so the tests say REQUIRE.
#include "lamina/collectives/torch_hooks.hpp"

#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#undef CHECK
#include "catch.hpp"
#include "lamina/collectives/collectives.hpp"
#include "support.hpp"

namespace {

using lamina::collectives::gated;
using lamina::collectives::gradient_hooks;
using lamina_test::contains;
using lamina_test::message_of;

torch::nn::Sequential make_network() {
  torch::manual_seed(1);
  torch::nn::Sequential network;
  network->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)));
  network->push_back(torch::nn::BatchNorm2d(4));
  network->push_back(torch::nn::ReLU());
  network->push_back(torch::nn::Flatten());
  network->push_back(torch::nn::Linear(4 * 36, 5));
  return network;
}

torch::Tensor loss_of(torch::nn::Sequential& network) {
  return network->forward(torch::ones({2, 1, 8, 8})).pow(2).sum() +
         network->forward(torch::rand({2, 1, 8, 8})).sum();
}

}  // namespace

TEST_CASE("hooks: each layer is told once, in the order of backward, when its gradient is complete") {
  auto network = make_network();
  const auto parameters = network->parameters();
  std::vector<std::size_t> order;
  std::vector<torch::Tensor> seen(parameters.size());
  gradient_hooks hooks(*network, [&](std::size_t l) {
    order.push_back(l);
    REQUIRE(parameters[l].grad().defined());
    seen[l] = parameters[l].grad().clone();
  });
  for (int step = 0; step < 3; ++step) {
    order.clear();
    network->zero_grad();
    loss_of(network).backward();  // uses every parameter twice
    REQUIRE(order.size() == parameters.size());
    REQUIRE(order.back() < 2);  // the convolution's
    for (std::size_t l = 0; l < parameters.size(); ++l) REQUIRE(torch::equal(seen[l], parameters[l].grad()));
    hooks.check_all_called();
  }
}

// The control: a hook of the tensor runs before .grad is written, and sees none in the first step.
TEST_CASE("hooks: a hook of the leaf itself would come too early") {
  auto network = make_network();
  const auto parameters = network->parameters();
  bool is_defined = true;
  parameters[0].register_hook([&](const torch::Tensor&) { is_defined = parameters[0].grad().defined(); });
  loss_of(network).backward();
  REQUIRE_FALSE(is_defined);
}

// The control: a hook on an accumulator that nobody keeps is never called.
TEST_CASE("hooks: the accumulator must be kept") {
  struct counting final : torch::autograd::FunctionPostHook {
    explicit counting(int& count) : calls(count) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      ++calls;
      return outputs;
    }
    int& calls;
  };
  auto network = make_network();
  int calls = 0;
  torch::autograd::impl::grad_accumulator(network->parameters()[0])
      ->add_post_hook(std::make_unique<counting>(calls));
  loss_of(network).backward();
  REQUIRE(calls == 0);
}

TEST_CASE("hooks: a parameter without a gradient is named") {
  struct two_heads : torch::nn::Module {
    torch::nn::Linear used = register_module("used", torch::nn::Linear(3, 2));
    torch::nn::Linear unused = register_module("unused", torch::nn::Linear(3, 2));
  } network;
  gradient_hooks hooks(network, [](std::size_t) {});
  network.used(torch::ones({1, 3})).sum().backward();
  REQUIRE(message_of<lamina::collectives::unused_parameter>([&] { hooks.check_all_called(); }) ==
          "no gradient for 'unused.weight', 'unused.bias': every parameter must be used in every step");
  network.used->weight.set_requires_grad(false);
  REQUIRE(contains(message_of<std::invalid_argument>([&] { gradient_hooks(network, [](std::size_t) {}); }),
                   "parameter 'used.weight' requires no gradient"));
}

TEST_CASE("hooks: paused in all passes but the last, else a second pass is refused") {
  auto network = make_network();
  std::size_t calls = 0;
  gradient_hooks hooks(*network, [&](std::size_t) { ++calls; });
  hooks.pause();
  loss_of(network).backward();
  REQUIRE(calls == 0);
  hooks.resume();
  loss_of(network).backward();
  REQUIRE(calls == network->parameters().size());
  REQUIRE(contains(message_of<std::logic_error>([&] { loss_of(network).backward(); }),
                   "is complete twice in one step"));
}

TEST_CASE("hooks: a parameter with two names is refused by both") {
  struct tied : torch::nn::Module {
    tied() { decoder->weight = decoder->register_parameter("tied", encoder->weight); }
    torch::nn::Linear encoder = register_module("encoder", torch::nn::Linear(3, 3));
    torch::nn::Linear decoder = register_module("decoder", torch::nn::Linear(3, 3));
  } network;
  REQUIRE(message_of<std::invalid_argument>([&] { gradient_hooks(network, [](std::size_t) {}); }) ==
          "parameters 'encoder.weight' and 'decoder.tied' are one tensor: it would be summed twice");
}

// As a loop that catches it and goes on with the next batch.
TEST_CASE("hooks: after an exception out of backward the next backward works") {
  auto network = make_network();
  int calls = 0;
  bool fails = true;
  gradient_hooks hooks(*network, [&](std::size_t) {
    if (++calls == 2 && fails) throw std::domain_error("diverged");
  });
  REQUIRE(message_of<std::domain_error>([&] { loss_of(network).backward(); }) == "diverged");
  fails = false;
  loss_of(network).backward();
  hooks.check_all_called();
  // One of the program's, in the midst of the pass.
  auto loss = [&] {
    auto hidden = network[0]->as<torch::nn::Conv2d>()->forward(torch::ones({2, 1, 8, 8}));
    hidden.register_hook([&](const torch::Tensor&) {
      if (fails) throw std::domain_error("a hook of the program's");
    });
    for (std::size_t k : {1U, 2U, 3U, 4U}) {
      if (k == 1) hidden = network[k]->as<torch::nn::BatchNorm2d>()->forward(hidden);
      if (k == 2) hidden = network[k]->as<torch::nn::ReLU>()->forward(hidden);
      if (k == 3) hidden = network[k]->as<torch::nn::Flatten>()->forward(hidden);
      if (k == 4) hidden = network[k]->as<torch::nn::Linear>()->forward(hidden);
    }
    return hidden.pow(2).sum();
  };
  fails = true;
  REQUIRE(contains(message_of<std::exception>([&] { loss().backward(); }), "a hook of the program's"));
  fails = false;
  REQUIRE(contains(message_of<std::logic_error>([&] { loss().backward(); }),
                   "forget() a step in which backward() threw"));
  hooks.forget();
  loss().backward();
  hooks.check_all_called();
}

TEST_CASE("hooks: an exception comes out of backward as it is, and hooks are taken off with the object") {
  auto network = make_network();
  int calls = 0;
  {
    gradient_hooks hooks(*network, [&](std::size_t l) {
      ++calls;
      if (l == 2 && calls < 10) throw std::domain_error("diverged");
    });
    REQUIRE(message_of<std::domain_error>([&] { loss_of(network).backward(); }) == "diverged");
    REQUIRE_THROWS_AS(hooks.check_all_called(), lamina::collectives::unused_parameter);
    calls = 10;
    loss_of(network).backward();
    hooks.check_all_called();
  }
  calls = 0;
  loss_of(network).backward();
  REQUIRE(calls == 0);
}

// What lets a mean be written over a parameter while backward goes on.
TEST_CASE("hooks: a layer's parameters are not read any more once it was told") {
  auto expected = make_network();
  torch::manual_seed(5);
  loss_of(expected).backward();
  auto network = make_network();
  const auto parameters = network->parameters();
  gradient_hooks hooks(*network, [&](std::size_t l) {
    std::fill_n(parameters[l].data_ptr<float>(), parameters[l].numel(),
                std::numeric_limits<float>::quiet_NaN());
  });
  torch::manual_seed(5);
  loss_of(network).backward();
  for (std::size_t l = 0; l < parameters.size(); ++l)
    REQUIRE(torch::equal(parameters[l].grad(), expected->parameters()[l].grad()));
}

TEST_CASE("gate: it is waited for before each forward, and the module is as without") {
  std::vector<int> opened;
  torch::nn::Sequential network;
  torch::manual_seed(3);
  network->push_back(gated<torch::nn::LinearImpl>([&] { opened.push_back(0); }, 6, 4));
  network->push_back(torch::nn::ReLU());
  network->push_back(gated<torch::nn::LinearImpl>([&] { opened.push_back(1); }, 4, 2));
  torch::nn::Sequential plain;
  torch::manual_seed(3);
  plain->push_back(torch::nn::Linear(6, 4));
  plain->push_back(torch::nn::ReLU());
  plain->push_back(torch::nn::Linear(4, 2));
  const torch::Tensor input = torch::rand({3, 6});
  REQUIRE(torch::equal(network->forward(input), plain->forward(input)));
  REQUIRE(opened == std::vector<int>{0, 1});
  REQUIRE(network->named_parameters().keys() == plain->named_parameters().keys());
  REQUIRE(contains(message_of<std::logic_error>([&] { std::ignore = network[0]->clone(); }),
                   "is not cloned: make another with a gate of its own"));
  REQUIRE_THROWS_AS(network->clone(), std::logic_error);
}

TEST_CASE("gate: those of a network wait for the parameters of their own modules, and are taken off again") {
  using lamina::collectives::gate;
  using lamina::collectives::set_gates;
  const auto make = [](bool all_gated) {
    torch::nn::Sequential network;
    network->push_back(gated<torch::nn::Conv2dImpl>(gate(), torch::nn::Conv2dOptions(1, 2, 3).bias(false)));
    network->push_back(gated<torch::nn::Conv2dImpl>(gate(), torch::nn::Conv2dOptions(2, 2, 1)));
    network->push_back(torch::nn::Flatten());
    if (all_gated)
      network->push_back(gated<torch::nn::LinearImpl>(gate(), 8, 3));
    else
      network->push_back(torch::nn::Linear(8, 3));
    return network;
  };
  auto network = make(true);
  const torch::Tensor input = torch::rand({2, 1, 4, 4});
  std::vector<std::size_t> needed;
  const auto need = [&](std::size_t l) { needed.push_back(l); };
  set_gates(*network, need);
  network->forward(input);
  REQUIRE(needed == std::vector<std::size_t>{0, 1, 2, 3, 4});
  set_gates(*network, {});
  network->forward(input);
  REQUIRE(needed.size() == 5);

  auto half = make(false);
  REQUIRE(contains(message_of<std::invalid_argument>([&] { set_gates(*half, need); }),
                   "parameter '3.weight' is of a module without a gate"));
  half->forward(input);
  REQUIRE(needed.size() == 5);  // nothing has changed
}
