// SPDX-License-Identifier: MIT
#include "replay.hpp"  // Torch defines CHECK, so its headers come before Catch2's.

#include "catch.hpp"

#include <algorithm>
#include <fstream>
#include <lamina/collectives/torch_hooks.hpp>
#include <string>
#include <vector>

#include "temporary_directory.hpp"

using namespace lab;

namespace {

using lamina::collectives::gated;

const lamina::collectives::gate open_gate;

struct two_layers_impl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x)); }
  gated<torch::nn::LinearImpl> first =
      register_module("first", gated<torch::nn::LinearImpl>(open_gate, 2, 3));
  gated<torch::nn::LinearImpl> second =
      register_module("second", gated<torch::nn::LinearImpl>(open_gate, 3, 1));
};
TORCH_MODULE_IMPL(two_layers, two_layers_impl);

}  // namespace

TEST_CASE("replay: recorded gradients that are missing or of another model are named") {
  const temporary_directory directory;
  const lamina::layout model({{"layer", {4}}});
  const std::string nowhere = (directory.path() / "nowhere").string();
  CHECK_THROWS_WITH(recorded_gradients(nowhere, 0, model),
                    Catch::Matchers::Contains("no recorded gradients in " + nowhere));
  std::ofstream(directory.path() / "worker-0-0.f32") << "0123456789";
  CHECK_THROWS_WITH(recorded_gradients(directory.path().string(), 0, model),
                    Catch::Matchers::Contains("worker-0-0.f32 holds gradients of another model"));
}

TEST_CASE("replay: by layer, gates are passed in forward and gradients are ready in the recorded order") {
  const temporary_directory directory;
  const std::string recording = directory.path().string();
  replica local(torch::nn::AnyModule(two_layers()), 0);
  const std::size_t elements = local.model().elements();
  std::vector<float> recorded(elements);
  for (std::size_t i = 0; i < elements; ++i) recorded[i] = static_cast<float>(i + 1);
  std::ofstream(directory.path() / "worker-0-0.f32", std::ios::binary)
      .write(reinterpret_cast<const char*>(recorded.data()),
             static_cast<std::streamsize>(elements * sizeof(float)));
  CHECK_THROWS_WITH(paced_player(recording, 0, 0, local.model(), false),
                    Catch::Matchers::Contains("profile.txt is no profile of 4 layers"));
  step_profile{.forward_share = 0.25, .needed = {0.1, 0.1, 0.7, 0.7}, .ready = {0.4, 1, 0.8, 0.1}}.write(
      recording);
  CHECK(step_profile::read(recording, 4).needed == std::vector<double>{0.1, 0.1, 0.7, 0.7});

  paced_player player(recording, 0, 0.01, local.model(), false);
  torch::nn::Module& network = *local.network().ptr();
  std::vector<std::size_t> told;
  lamina::collectives::set_gates(network, [&](std::size_t l) { told.push_back(l); });
  lamina::collectives::gradient_hooks hooks(network, [&](std::size_t l) { told.push_back(10 + l); });
  for (int step = 0; step < 3; ++step) {  // a step does not add to the one before
    told.clear();
    player.play(local);
    hooks.check_all_called();
    // A gate is of a module, and is passed for each of its two layers.
    CHECK(told == std::vector<std::size_t>{0, 1, 0, 1, 2, 3, 2, 3, 13, 10, 12, 11});
    std::size_t i = 0;
    const auto gradients = local.gradient_elements();
    for (const auto gradient : gradients) {
      for (const float each : gradient) CHECK(each == recorded[i++]);
    }
  }
}

TEST_CASE("replay: by layer, gradients that may be any need not be recorded, and take no memory") {
  const temporary_directory directory;
  const std::string recording = directory.path().string();
  replica local(torch::nn::AnyModule(two_layers()), 0);
  step_profile{.forward_share = 0.25, .needed = {0, 0, 0, 0}, .ready = {1, 1, 1, 1}}.write(recording);
  CHECK_THROWS_WITH(paced_player(recording, 0, 0, local.model(), false),
                    Catch::Matchers::Contains("no recorded gradients in " + recording));
  paced_player player(recording, 0, 0, local.model(), true);
  for (int step = 0; step < 2; ++step) {
    player.play(local);
    for (std::size_t l = 0; l < local.model().layers(); ++l) {
      CHECK(local.gradient_elements()[l].size() == local.model().sizes()[l]);
      CHECK(std::ranges::count(local.gradient_elements()[l], 0.0F) ==
            static_cast<std::ptrdiff_t>(local.gradient_elements()[l].size()));
      CHECK(local.gradient_elements()[l].data() == local.gradient_elements()[0].data());
    }
  }
}

TEST_CASE("replay: a profile has the order of a real step") {
  replica local(torch::nn::AnyModule(two_layers()), 0);
  const step_profile seen = step_profile::of(local, [&] {
    local.network().forward(torch::ones({4, 2})).sum().backward();
  });
  CHECK(seen.forward_share > 0);
  CHECK(seen.forward_share < 1);
  CHECK(seen.needed[0] <= seen.needed[2]);
  CHECK(seen.ready[2] <= seen.ready[0]);  // the second layer is first in backward
  for (const double each : seen.ready) {
    CHECK(each >= 0);
    CHECK(each <= 1);
  }
}
