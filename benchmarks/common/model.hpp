// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "in_turn.hpp"
#include "lamina/half.hpp"
#include "lamina/layout.hpp"

/// What the benchmarks measure with: the layers of real models, and gradients.
namespace lamina_benchmark {

/// The layers of a file: a line a layer, its name and its shape as 64x3x7x7.
inline lamina::layout read_layers(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::vector<lamina::layer> layers;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.front() == '#') continue;
    lamina::layer layer;
    std::istringstream text(line);
    text >> layer.name;
    bool goes_on = true;
    while (goes_on && (text >> std::ws).peek() != '-') {
      std::size_t extent = 0;
      if (!(text >> extent)) break;
      layer.shape.push_back(extent);
      goes_on = text.get() == 'x';
    }
    if (goes_on || !text.eof()) throw std::runtime_error(path + ": this is no layer: " + line);
    layers.push_back(std::move(layer));
  }
  return lamina::layout(std::move(layers));
}

#ifdef LAMINA_BENCHMARK_MODELS
/// Those of models/NAME.txt.
inline lamina::layout read_model(const std::string& name) {
  return read_layers(std::string(LAMINA_BENCHMARK_MODELS) + "/" + name + ".txt");
}
#endif

/// `count` layers of as many elements each.
inline lamina::layout equal_layers(std::size_t count, std::size_t elements) {
  std::vector<lamina::layer> layers;
  layers.reserve(count);
  for (std::size_t l = 0; l < count; ++l) layers.push_back({"layer" + std::to_string(l), {elements}});
  return lamina::layout(std::move(layers));
}

/// A permutation of the 64-bit numbers that looks random: the finalizer of SplitMix64 (Steele et al. 2014).
constexpr std::uint64_t scrambled(std::uint64_t number) {
  number += 0x9e3779b97f4a7c15;
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
  number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
  return number ^ (number >> 31);
}

/// Numbers with the double exponential law of unit mean magnitude, which gradients follow roughly (Abdelmoniem et al.,
/// SIDCo, MLSys 2021): one for each 64-bit number, quickly, from a table of quantiles.
class laplace_numbers {
 public:
  laplace_numbers() : quantiles_(table_size) {
    for (std::size_t i = 0; i < table_size; ++i) {
      const double share = (static_cast<double>(i) + 0.5) / static_cast<double>(table_size);
      quantiles_[i] = static_cast<float>(share < 0.5 ? std::log(2 * share) : -std::log(2 - 2 * share));
    }
  }

  float operator()(std::uint64_t number) const {
    const std::uint64_t bits = scrambled(number);
    // Spread a little, so that magnitudes are not tied by the thousand.
    const float spread = 0.875F + 0.25F * static_cast<float>(bits >> 40U) / 16777216.0F;
    return quantiles_[bits % table_size] * spread;
  }

 private:
  static constexpr std::size_t table_size = 1 << 14;
  std::vector<float> quantiles_;
};

/// The gradient of one step of a training that does not exist: a part that is the same in all steps and three times as
/// much noise, at a scale that differs from layer to layer by up to 2^(octaves - 1) times. N elements, the same on every
/// machine.
inline void write_gradient(const lamina::layout& model, std::uint64_t step, std::span<float> gradient,
                           std::uint64_t octaves = 8) {
  static const laplace_numbers numbers;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const float scale = std::exp2(-static_cast<float>(scrambled(l) % octaves));
    const std::uint64_t first = model.offset(l);
    for (std::uint64_t i = first; i < first + model.sizes()[l]; ++i) {
      gradient[i] = scale * (0.25F * numbers(i) + 0.75F * numbers(i + (step << 40U)));
    }
  }
}

inline std::vector<float> gradient_of_step(const lamina::layout& model, std::uint64_t step) {
  std::vector<float> gradient(model.elements());
  write_gradient(model, step, gradient);
  return gradient;
}

/// Gradients to be used in turn, so many that the last-level cache has none of one when its turn comes, as after a backward pass. T is float, or
/// one of half the width, of which it takes more.
template <class T = float>
std::vector<std::vector<T>> gradients_in_turn(const lamina::layout& model,
                                              std::size_t cache_bytes = last_level_cache_bytes()) {
  std::vector<std::vector<T>> gradients;
  const std::size_t count = count_in_turn(model.elements() * sizeof(T), cache_bytes);
  for (std::uint64_t step = 1; step <= count; ++step) {
    std::vector<float> gradient = gradient_of_step(model, step);
    if constexpr (std::is_same_v<T, float>) {
      gradients.push_back(std::move(gradient));
    } else {
      std::vector<T>& rounded = gradients.emplace_back(gradient.size());
      std::ranges::transform(gradient, rounded.begin(), lamina::saturating_round<T>);
    }
  }
  return gradients;
}

/// Layer l of N numbers: const if they are.
template <class Numbers>
auto layer_of(Numbers&& all, const lamina::layout& model, std::size_t l) {
  return std::span(all).subspan(model.offset(l), model.sizes()[l]);
}

}  // namespace lamina_benchmark
