// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace lab {

/// Stochastic gradient descent as in torch.optim.SGD without dampening, v <- μ v + g and x <- x - η v, of blocks anywhere in the model: what is
/// not updated keeps its parameters and its velocity. Two threads may update two blocks at once.
class sgd {
 public:
  sgd(std::size_t elements, float momentum) : momentum_(momentum), velocity_(momentum == 0 ? 0 : elements) {}

  /// The parameters `x` that begin at element `offset` of the model.
  void update(std::size_t offset, std::span<const float> gradient, std::span<float> x, float learning_rate) {
    if (velocity_.empty()) {
      for (std::size_t i = 0; i < x.size(); ++i) x[i] -= learning_rate * gradient[i];
      return;
    }
    float* const v = velocity_.data() + offset;
    for (std::size_t i = 0; i < x.size(); ++i) {
      v[i] = momentum_ * v[i] + gradient[i];
      x[i] -= learning_rate * v[i];
    }
  }

 private:
  float momentum_;
  std::vector<float> velocity_;
};

}  // namespace lab
