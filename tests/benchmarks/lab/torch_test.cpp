// SPDX-License-Identifier: MIT
#include "networks.hpp"  // Torch defines CHECK, so its headers come before Catch2's.
#include "replay.hpp"
#include "replica.hpp"
#include "sgd.hpp"

#include <torch/torch.h>

#include "catch.hpp"

#include <fstream>
#include <lamina/collectives/torch_hooks.hpp>
#include <string>
#include <vector>

#include "common/model.hpp"
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

void require_layers_of(const replica& local, const std::string& file) {
  const lamina::layout expected =
      lamina_benchmark::read_layers(LAMINA_SOURCE_DIR "/benchmarks/models/" + file);
  REQUIRE(local.model().layers() == expected.layers());
  for (std::size_t l = 0; l < expected.layers(); ++l) {
    INFO(expected[l].name);
    REQUIRE(local.model()[l].name == expected[l].name);
    REQUIRE(local.model()[l].shape == expected[l].shape);
  }
}

// Some images by heart in more than one step, and every gate is passed.
void require_to_learn(replica& local, std::int64_t side, float rate, int steps) {
  std::vector<bool> was_needed(local.model().layers());
  lamina::collectives::set_gates(*local.network().ptr(), [&](std::size_t l) { was_needed[l] = true; });
  sgd optimizer(local.model().elements(), 0);
  const torch::Tensor images = torch::randn({4, 3, side, side});
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    local.network().ptr()->zero_grad();
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(local.network().forward(images), torch::arange(4));
    loss.backward();
    losses.push_back(loss.item<double>());
    if (step + 1 == steps) break;
    const auto gradients = local.gradient_elements();
    for (std::size_t l = 0; l < gradients.size(); ++l)
      optimizer.update(local.model().offset(l), gradients[l], local[l], rate);
  }
  INFO(losses.front() << " " << losses.back());
  REQUIRE((steps == 1 || losses.back() < losses.front()));
  REQUIRE(was_needed == std::vector<bool>(local.model().layers(), true));
}

}  // namespace

TEST_CASE(
    "networks: ResNet-50 has torchvision's layers, its strides in the first convolution of a stage, and "
    "learns") {
  torch::manual_seed(3);
  replica local(make_network("resnet50", 1000), 0);
  require_layers_of(local, "resnet50.txt");
  for (const auto& item : local.network().ptr()->named_modules()) {
    if (item.key() == "layer2.0.conv1" || item.key() == "layer4.0.conv1")
      REQUIRE(item.value()->as<torch::nn::Conv2dImpl>()->options.stride()->at(0) == 2);
    if (item.key() == "layer2.0.conv2")
      REQUIRE(item.value()->as<torch::nn::Conv2dImpl>()->options.stride()->at(0) == 1);
  }
  require_to_learn(local, 32, 0.02F, 3);
}

TEST_CASE("networks: VGG-16 has the layers of benchmarks/models/vgg16.txt, and gates before them") {
  torch::manual_seed(3);
  replica local(make_network("vgg16", 1000), 0);
  require_layers_of(local, "vgg16.txt");
  require_to_learn(local, 32, 0.03F, 1);
}

TEST_CASE("sgd: as torch's, with and without momentum; a layer that is left out does not move") {
  for (const float momentum : {0.0F, 0.9F}) {
    torch::Tensor x = torch::randn({40}).requires_grad_();
    std::vector<float> mine(x.data_ptr<float>(), x.data_ptr<float>() + 40);
    torch::optim::SGD theirs({x}, torch::optim::SGDOptions(0.1).momentum(momentum));
    sgd ours(100, momentum);
    for (int step = 0; step < 4; ++step) {
      x.mutable_grad() = torch::randn({40});
      const std::vector<float> gradient(x.grad().data_ptr<float>(), x.grad().data_ptr<float>() + 40);
      theirs.step();
      ours.update(50, std::span(gradient).first(10), std::span(mine).first(10), 0.1F);  // in two blocks
      ours.update(60, std::span(gradient).subspan(10), std::span(mine).subspan(10), 0.1F);
    }
    for (std::size_t i = 0; i < 40; ++i)
      REQUIRE(mine[i] == Approx(x[static_cast<std::int64_t>(i)].item<float>()).margin(1e-6));
  }
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
  REQUIRE_THROWS_WITH(paced_player(recording, 0, 0, local.model(), false),
                      Catch::Matchers::Contains("profile.txt is no profile of 4 layers"));
  step_profile{.forward_share = 0.25, .needed = {0.1, 0.1, 0.7, 0.7}, .ready = {0.4, 1, 0.8, 0.1}}.write(
      recording);
  REQUIRE(step_profile::read(recording, 4).needed == std::vector<double>{0.1, 0.1, 0.7, 0.7});

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
    REQUIRE(told == std::vector<std::size_t>{0, 1, 0, 1, 2, 3, 2, 3, 13, 10, 12, 11});
    std::size_t i = 0;
    const auto gradients = local.gradient_elements();
    for (const auto gradient : gradients) {
      for (const float each : gradient) CHECK(each == recorded[i++]);
    }
  }
}
