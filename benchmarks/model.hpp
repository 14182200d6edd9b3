// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstddef>
#include <fstream>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/layout.hpp"

/// What the benchmarks measure with: the layers of real models, and gradients.
namespace lamina_benchmark {

/// The layers of models/NAME.txt: a line a layer, its name and its shape as 64x3x7x7.
inline lamina::layout read_model(const std::string& name) {
  const std::string path = std::string(LAMINA_BENCHMARK_MODELS) + "/" + name + ".txt";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::vector<lamina::layer> layers;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.front() == '#') continue;
    lamina::layer layer;
    std::istringstream text(line);
    text >> layer.name;
    for (std::size_t extent; text >> extent; text.ignore()) layer.shape.push_back(extent);
    layers.push_back(std::move(layer));
  }
  return lamina::layout(std::move(layers));
}

/// N numbers of both signs, whose size differs from layer to layer as that of gradients does.
inline std::vector<float> random_gradient(const lamina::layout& model, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> gradient(model.elements());
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const float scale = std::exp2(-static_cast<float>(random() % 8));
    for (float& each : std::span(gradient).subspan(model.offset(l), model.sizes()[l])) {
      each = scale * (static_cast<float>(random()) / 2147483648.0F - 1.0F);
    }
  }
  return gradient;
}

inline std::span<const float> layer_of(const std::vector<float>& gradient, const lamina::layout& model,
                                       std::size_t l) {
  return std::span(gradient).subspan(model.offset(l), model.sizes()[l]);
}

}  // namespace lamina_benchmark
