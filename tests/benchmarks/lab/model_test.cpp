// SPDX-License-Identifier: MIT
#include "model/model_file.hpp"  // Torch defines CHECK, so its headers come before Catch2's.
#include "model/resnet50.hpp"

#include "catch.hpp"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "temporary_directory.hpp"

namespace {

using lab::model_options;
using lab::resnet50;
using lab::stem;
using shapes_by_name = std::map<std::string, std::vector<std::int64_t>>;

shapes_by_name parameter_shapes(resnet50& model) {
  shapes_by_name shapes;
  for (const auto& item : model->named_parameters()) shapes[item.key()] = item.value().sizes().vec();
  return shapes;
}

std::int64_t stride_of(resnet50& model, const std::string& name) {
  return model->named_modules()[name]->as<torch::nn::Conv2d>()->options.stride()->at(0);
}

TEST_CASE("ResNet-50 has 161 parameter tensors of 25,557,032 elements with unique names") {
  resnet50 model(model_options{});
  std::int64_t elements = 0;
  for (const torch::Tensor& parameter : model->parameters()) elements += parameter.numel();
  REQUIRE(model->parameters().size() == 161);
  REQUIRE(parameter_shapes(model).size() == 161);
  REQUIRE(elements == 25'557'032);
}

TEST_CASE("ResNet-50's parameters have the names and shapes of torchvision's") {
  resnet50 model(model_options{});
  const shapes_by_name shapes = parameter_shapes(model);
  const shapes_by_name expected = {
      {"conv1.weight", {64, 3, 7, 7}},
      {"bn1.weight", {64}},
      {"bn1.bias", {64}},
      {"layer1.0.conv1.weight", {64, 64, 1, 1}},
      {"layer1.0.conv2.weight", {64, 64, 3, 3}},
      {"layer1.0.conv3.weight", {256, 64, 1, 1}},
      {"layer1.0.downsample.0.weight", {256, 64, 1, 1}},
      {"layer1.0.downsample.1.bias", {256}},
      {"layer2.3.bn2.weight", {128}},
      {"layer3.5.conv1.weight", {256, 1024, 1, 1}},
      {"layer4.0.downsample.0.weight", {2048, 1024, 1, 1}},
      {"layer4.2.bn3.bias", {2048}},
      {"fc.weight", {1000, 2048}},
      {"fc.bias", {1000}},
  };
  for (const auto& [name, shape] : expected) {
    INFO(name);
    REQUIRE(shapes.count(name) == 1);
    REQUIRE(shapes.at(name) == shape);
  }
  REQUIRE(shapes.count("layer1.1.downsample.0.weight") == 0);
}

TEST_CASE("the number of classes changes only the last layer of ResNet-50") {
  resnet50 thousand(model_options{}), ten(model_options{10, stem::standard});
  shapes_by_name expected = parameter_shapes(thousand);
  expected["fc.weight"] = {10, 2048};
  expected["fc.bias"] = {10};
  REQUIRE(parameter_shapes(ten) == expected);
}

TEST_CASE("ResNet-50 v1 has its strides in the first convolution of a stage") {
  resnet50 model(model_options{10, stem::standard});
  for (const std::string stage : {"layer1", "layer2", "layer3", "layer4"}) {
    INFO(stage);
    const std::int64_t stride = stage == "layer1" ? 1 : 2;
    REQUIRE(stride_of(model, stage + ".0.conv1") == stride);
    REQUIRE(stride_of(model, stage + ".0.conv2") == 1);
    REQUIRE(stride_of(model, stage + ".0.downsample.0") == stride);
    REQUIRE(stride_of(model, stage + ".1.conv1") == 1);
  }
}

TEST_CASE(
    "ResNet-50 starts with He-normal convolutions, neutral batch norms, and blocks that are their "
    "shortcuts") {
  torch::manual_seed(1);
  resnet50 model(model_options{10, stem::standard});
  const torch::OrderedDict<std::string, torch::Tensor> parameters = model->named_parameters();
  const double fan_out = 512 * 3 * 3;
  const torch::Tensor convolution = parameters["layer4.1.conv2.weight"];
  REQUIRE(std::abs(convolution.std().item<double>() - std::sqrt(2 / fan_out)) <
          1e-3 * std::sqrt(2 / fan_out));
  REQUIRE((parameters["layer4.1.bn2.weight"] == 1).all().item<bool>());
  REQUIRE((parameters["layer4.1.bn3.weight"] == 0).all().item<bool>());
  REQUIRE((parameters["layer4.1.bn3.bias"] == 0).all().item<bool>());
}

TEST_CASE("both stems of ResNet-50 give one row of logits for each image") {
  const torch::NoGradGuard no_grad;
  for (const stem kind : {stem::standard, stem::small}) {
    resnet50 model(model_options{10, kind});
    model->eval();
    for (const std::int64_t size_pixels : {32, 65}) {
      const torch::Tensor logits = model->forward(torch::rand({2, 3, size_pixels, size_pixels}));
      REQUIRE(logits.sizes() == std::vector<std::int64_t>{2, 10});
      REQUIRE(logits.isfinite().all().item<bool>());
    }
  }
}

TEST_CASE("every parameter of ResNet-50 gets a gradient once blocks are more than their shortcuts") {
  resnet50 model(model_options{10, stem::standard});
  for (const auto& item : model->named_parameters()) {
    const torch::NoGradGuard no_grad;
    if (item.key().ends_with("bn3.weight")) torch::nn::init::ones_(item.value());
  }
  model->forward(torch::rand({2, 3, 64, 64})).square().sum().backward();
  for (const auto& item : model->named_parameters()) {
    INFO(item.key());
    REQUIRE(item.value().grad().defined());
    REQUIRE(item.value().grad().abs().sum().item<double>() > 0);
  }
}

TEST_CASE("a model that was saved is loaded with all its tensors, and others are refused by name") {
  const temporary_directory directory;
  const std::string file = (directory.path() / "model.pt").string();
  torch::manual_seed(1);
  resnet50 saved(model_options{.classes = 7});
  for (torch::Tensor each : saved->buffers()) each.add_(3);
  lab::save_model(*saved, file);
  REQUIRE(!std::filesystem::exists(file + ".part"));

  torch::manual_seed(2);
  resnet50 loaded(model_options{.classes = 7});
  lab::load_model(*loaded, file);
  const auto before = saved->named_parameters();
  for (const auto& each : loaded->named_parameters()) REQUIRE(each.value().equal(before[each.key()]));
  const auto statistics = saved->named_buffers();
  for (const auto& each : loaded->named_buffers()) REQUIRE(each.value().equal(statistics[each.key()]));

  using Catch::Matchers::Contains;
  resnet50 other(model_options{.classes = 8});
  REQUIRE_THROWS_WITH(lab::load_model(*other, file),
                      Contains(file) && Contains("fc.weight is of [7, 2048], not of [8, 2048]"));
  torch::nn::Linear linear(2, 3);
  REQUIRE_THROWS_WITH(lab::load_model(*linear, file), Contains("it has no tensor weight"));
  REQUIRE_THROWS_WITH(lab::load_model(*other, file + "x"),
                      Contains("there is no model " + file + "x"));
  std::ofstream(file) << "no model";
  REQUIRE_THROWS_WITH(lab::load_model(*other, file), Contains("cannot load the model " + file));
  REQUIRE_THROWS_WITH(lab::save_model(*other, "/nowhere/model.pt"), Contains("/nowhere/model.pt"));
}

}  // namespace
