// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <lamina/layout.hpp>
#include <span>
#include <vector>

namespace resnet50_ps {

struct sgd_options {
  float learning_rate = 0.01F;  ///< η: finite, 0 or more
  float momentum = 0;           ///< μ: in [0, 1); 0 keeps no velocity
  float weight_decay = 0;       ///< λ: finite, 0 or more
  bool nesterov = false;        ///< look ahead by one step of the momentum, which must not be 0
};

/// Stochastic gradient descent at the server, as in torch.optim.SGD without dampening:
/// g <- G + λ x, v <- μ v + g, and x <- x - η v, or with Nesterov x <- x - η (g + μ v).
///
/// Only what is passed to update() changes: a layer that no worker sent keeps its parameters and its
/// velocity, and its weights do not decay. The velocity begins as zeros.
class sgd {
 public:
  /// Throws std::invalid_argument that names the option which is out of its range or not a number.
  sgd(const lamina::layout& model, sgd_options options);

  /// Updates the elements of `layer` from `begin` on, as many as `gradient` has, in one pass; `parameters` is
  /// the whole layer. Each element is computed on its own, so blocks give what the whole layer gives. Throws,
  /// before anything is written, std::invalid_argument if `parameters` is not of the layer's size and
  /// std::out_of_range for a layer or a block that is not in the model.
  void update(std::size_t layer, std::size_t begin, std::span<const float> gradient,
              std::span<float> parameters);

  /// η of the updates from here on; throws std::invalid_argument unless it is finite and 0 or more.
  void set_learning_rate(float rate);

  /// v of all layers, one behind the other: N elements, or none without momentum. With the parameters and the
  /// step it is all there is to save; written back, training goes on as if it had not stopped.
  std::span<float> velocity() noexcept { return velocity_; }
  std::span<const float> velocity() const noexcept { return velocity_; }

 private:
  lamina::layout model_;
  sgd_options options_;
  std::vector<float> velocity_;
};

}  // namespace resnet50_ps
