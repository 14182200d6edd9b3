// SPDX-License-Identifier: MIT
// Torch first: its CHECK and Catch2's clash, so the tests say REQUIRE.
#include "lamina/collectives/torch_hooks.hpp"

#include <tuple>

#undef CHECK
#include "catch.hpp"
#include "lamina/collectives/collectives.hpp"
#include "support.hpp"

namespace {

using lamina::collectives::gate;
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

TEST_CASE("hooks: a parameter without a gradient, or with two names, is named") {
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
  struct tied : torch::nn::Module {
    tied() { decoder->weight = decoder->register_parameter("tied", encoder->weight); }
    torch::nn::Linear encoder = register_module("encoder", torch::nn::Linear(3, 3));
    torch::nn::Linear decoder = register_module("decoder", torch::nn::Linear(3, 3));
  } twice;
  REQUIRE(message_of<std::invalid_argument>([&] { gradient_hooks(twice, [](std::size_t) {}); }) ==
          "parameters 'encoder.weight' and 'decoder.tied' are one tensor: it would be summed twice");
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

// As a loop that catches it and goes on with the next batch.
TEST_CASE("hooks: an exception comes out of backward as it is, and the next backward works") {
  auto network = make_network();
  int calls = 0;
  bool fails = true;
  std::optional<gradient_hooks> hooks(std::in_place, *network, [&](std::size_t) {
    if (++calls == 2 && fails) throw std::domain_error("diverged");
  });
  REQUIRE(message_of<std::domain_error>([&] { loss_of(network).backward(); }) == "diverged");
  REQUIRE_THROWS_AS(hooks->check_all_called(), lamina::collectives::unused_parameter);
  fails = false;
  loss_of(network).backward();
  hooks->check_all_called();
  // One of the program's, in the midst of the pass.
  auto loss = [&] {
    auto hidden = network[0]->as<torch::nn::Conv2d>()->forward(torch::ones({2, 1, 8, 8}));
    hidden.register_hook([&](const torch::Tensor&) {
      if (fails) throw std::domain_error("a hook of the program's");
    });
    hidden = network[1]->as<torch::nn::BatchNorm2d>()->forward(hidden).relu().flatten(1);
    return network[4]->as<torch::nn::Linear>()->forward(hidden).pow(2).sum();
  };
  fails = true;
  REQUIRE(contains(message_of<std::exception>([&] { loss().backward(); }), "a hook of the program's"));
  fails = false;
  REQUIRE(contains(message_of<std::logic_error>([&] { loss().backward(); }),
                   "forget() a step in which backward() threw"));
  hooks->forget();
  loss().backward();
  hooks->check_all_called();
  hooks.reset();  // takes them off
  calls = 0;
  loss().backward();
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
  using lamina::collectives::set_gates;
  torch::nn::Sequential network;
  network->push_back(gated<torch::nn::Conv2dImpl>(gate(), torch::nn::Conv2dOptions(1, 2, 3).bias(false)));
  network->push_back(gated<torch::nn::Conv2dImpl>(gate(), torch::nn::Conv2dOptions(2, 2, 1)));
  const torch::Tensor input = torch::rand({2, 1, 4, 4});
  std::vector<std::size_t> needed;
  const auto need = [&](std::size_t l) { needed.push_back(l); };
  set_gates(*network, need);
  network->forward(input);
  REQUIRE(needed == std::vector<std::size_t>{0, 1, 2});
  set_gates(*network, {});
  network->forward(input);
  network->push_back(torch::nn::Linear(2, 3));
  REQUIRE(contains(message_of<std::invalid_argument>([&] { set_gates(*network, need); }),
                   "parameter '2.weight' is of a module without a gate"));
  network->forward(input);
  REQUIRE(needed.size() == 3);  // nothing has changed
}
