// SPDX-License-Identifier: MIT
#include "model/vgg.hpp"  // Torch defines CHECK, so its headers come before Catch2's.

#include <torch/nn/functional/loss.h>

#include "model/network.hpp"
#include "model/optimizer.hpp"
#include "model/passes.hpp"
#include "model/replica.hpp"

#include "catch.hpp"

#include <algorithm>
#include <lamina/collectives/torch_hooks.hpp>
#include <string>
#include <vector>

#include "common/model.hpp"

namespace {

using namespace lab;

// One case, since to make the network takes most of its time.
TEST_CASE(
    "VGG-16 has the layers of benchmarks/models/vgg16.txt, and learns a few of the smallest images by "
    "heart") {
  torch::manual_seed(3);
  replica local(make_network("vgg16", {.classes = 1000}));
  const lamina::layout expected =
      lamina_benchmark::read_layers(LAMINA_SOURCE_DIR "/benchmarks/models/vgg16.txt");
  const lamina::layout& found = local.model();
  REQUIRE(found.layers() == expected.layers());
  for (std::size_t l = 0; l < expected.layers(); ++l) {
    INFO(expected[l].name);
    REQUIRE(found[l].name == expected[l].name);
    REQUIRE(found[l].shape == expected[l].shape);
  }
  REQUIRE(found.elements() == 138'357'544);

  std::vector<bool> was_needed(found.layers());
  lamina::collectives::set_gates(*local.network().ptr(), [&](std::size_t l) { was_needed[l] = true; });
  sgd optimizer(found, {.learning_rate = 0.03F});
  const batch_stream::batch images = {torch::randn({4, 3, vgg16_least_pixels, vgg16_least_pixels}),
                                      torch::arange(4)};
  std::vector<double> losses;
  for (std::uint64_t step = 1; step <= 3; ++step) {
    step_report report;
    compute_gradients(local, images, report);
    losses.push_back(report.loss);
    for (std::size_t l = 0; l < found.layers(); ++l) {
      INFO(found[l].name);
      REQUIRE(std::ranges::any_of(local.gradient(l), [](float each) { return each != 0; }));
      optimizer.begin(l, step);
      optimizer.update(l, 0, local.gradient(l), local[l]);
    }
  }
  INFO(losses[0] << " " << losses[1] << " " << losses[2]);
  for (std::size_t step = 1; step < losses.size(); ++step) REQUIRE(losses[step] < losses[step - 1]);
  REQUIRE(losses.back() < 0.98 * losses.front());
  REQUIRE(was_needed == std::vector<bool>(found.layers(), true));
}

TEST_CASE("there is no network of another name") {
  REQUIRE_THROWS_WITH(make_network("vgg11", {}), "there is no network 'vgg11'");
}

}  // namespace
