// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <lamina/layout.hpp>
#include <span>
#include <vector>

namespace resnet50_ps {

struct sgd_options {
  float learning_rate = 0.01F;
  float momentum = 0;
};

/// Stochastic gradient descent at the server: v <- μ v + G, x <- x - η v. Only what is passed to update()
/// changes, so a layer that no worker sent keeps its velocity too.
class sgd {
 public:
  sgd(const lamina::layout& model, sgd_options options)
      : options_(options), model_(&model), velocity_(options.momentum == 0 ? 0 : model.elements()) {}

  /// Updates the elements of `layer` from `begin` on; `parameters` is the whole layer.
  void update(std::size_t layer, std::size_t begin, std::span<const float> gradient,
              std::span<float> parameters) {
    float* x = parameters.data() + begin;
    if (options_.momentum == 0) {
      for (std::size_t i = 0; i < gradient.size(); ++i) x[i] -= options_.learning_rate * gradient[i];
      return;
    }
    float* v = velocity_.data() + model_->offset(layer) + begin;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      v[i] = options_.momentum * v[i] + gradient[i];
      x[i] -= options_.learning_rate * v[i];
    }
  }

 private:
  sgd_options options_;
  const lamina::layout* model_;
  std::vector<float> velocity_;
};

}  // namespace resnet50_ps
