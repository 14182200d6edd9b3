// SPDX-License-Identifier: MIT
// The tables of real models, and the gradients that the benchmarks measure with.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "catch.hpp"
#include "common/model.hpp"

using namespace lamina_benchmark;

TEST_CASE("models: layers and elements are those of the published models") {
  struct published {
    std::string name;
    std::size_t layers;
    std::size_t elements;
    std::size_t largest;
  };
  // As torchvision and transformers count them; largest is fc1 of VGG-16 and the embeddings of the other two.
  const std::vector<published> expected = {{"resnet50", 161, 25'557'032, 512 * 512 * 9},
                                           {"vgg16", 32, 138'357'544, 25'088 * 4'096},
                                           {"bert_base", 199, 109'482'240, 30'522 * 768},
                                           {"gpt2", 148, 124'439'808, 50'257 * 768}};
  for (const published& each : expected) {
    INFO(each.name);
    const lamina::layout model = read_model(each.name);
    REQUIRE(model.layers() == each.layers);
    REQUIRE(model.elements() == each.elements);
    REQUIRE(std::ranges::max(model.sizes()) == each.largest);
  }
  REQUIRE_THROWS_WITH(read_model("alexnet"), Catch::Contains("alexnet.txt"));
}

TEST_CASE(
    "models: a gradient is the same each time, differs from step to step, and follows the law it says") {
  const lamina::layout model = equal_layers(2, 100'000);
  const std::vector<float> first = gradient_of_step(model, 1);
  REQUIRE(first == gradient_of_step(model, 1));
  REQUIRE(first != gradient_of_step(model, 2));

  const laplace_numbers numbers;
  double sum = 0;
  double magnitudes = 0;
  std::size_t beyond = 0;
  constexpr std::size_t count = 200'000;
  for (std::size_t i = 0; i < count; ++i) {
    const float each = numbers(i);
    sum += each;
    magnitudes += std::abs(each);
    beyond += std::abs(each) > 3 ? 1 : 0;
  }
  REQUIRE(std::abs(sum / count) < 0.02);
  REQUIRE(magnitudes / count == Approx(1).margin(0.02));
  REQUIRE(static_cast<double>(beyond) / count == Approx(std::exp(-3.0)).margin(0.005));
}
