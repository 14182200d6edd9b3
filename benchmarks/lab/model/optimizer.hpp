// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/layout.hpp>
#include <span>
#include <vector>

namespace lab {

struct sgd_options {
  float learning_rate = 0.01F;  ///< η: finite, 0 or more
  float momentum = 0;           ///< μ: in [0, 1); 0 keeps no velocity
  float weight_decay = 0;       ///< λ: finite, 0 or more
  bool nesterov = false;        ///< look ahead by one step of the momentum, which must not be 0
};

/// Stochastic gradient descent at the server, as in torch.optim.SGD without dampening:
/// g <- G + λ x, v <- μ v + g, and x <- x - η v, or with Nesterov x <- x - η (g + μ v).
///
/// Only what is passed to update() changes: a layer that no worker sent keeps its parameters and its velocity. Its weights
/// decay when it arrives: k steps after its last gradient they are multiplied by (1 - η λ)^k, with the η of then, so that a layer
/// sent every 20th step decays as much as one that is sent in each. The velocity begins as zeros.
///
/// A step may bring a layer several gradients, as of an asynchronous server's workers, whose sum is G: the first of a step
/// brings μ v and λ x with it, the others add to v and x what is theirs. All together move the layer as far as one update with
/// their sum, but for rounding.
///
/// Layers do not touch each other: two threads may update two of them at once.
class sgd {
 public:
  enum class rule { plain, momentum, nesterov };

  /// Throws std::invalid_argument that names the option which is out of its range or not a number.
  sgd(const lamina::layout& model, sgd_options options);

  /// The gradients that update() takes from here on are of one gradient of `layer`, in `step`, counted from 1. Throws
  /// std::out_of_range for a layer that is not in the model, and std::invalid_argument for a step before the layer's last.
  void begin(std::size_t layer, std::uint64_t step);
  /// Updates the elements of `layer` from `begin` on, as many as `gradient` has, in one pass; `parameters` is
  /// the whole layer. Each element is computed on its own, so blocks give what the whole layer gives. Throws,
  /// before anything is written, std::invalid_argument if `parameters` is not of the layer's size and
  /// std::out_of_range for a layer or a block that is not in the model.
  void update(std::size_t layer, std::size_t begin, std::span<const float> gradient,
              std::span<float> parameters);

  /// η of the updates from here on; throws std::invalid_argument unless it is finite and 0 or more.
  void set_learning_rate(float rate);
  float learning_rate() const noexcept { return options_.learning_rate; }

  /// v of all layers, one behind the other: N elements, or none without momentum.
  std::span<float> velocity() noexcept { return velocity_; }
  std::span<const float> velocity() const noexcept { return velocity_; }
  /// For each layer the step of its last gradient, 0 before the first. With the velocity, the parameters and the step it is all
  /// there is to save; written back, training goes on as if it had not stopped.
  std::span<std::uint64_t> updated_in() noexcept { return updated_in_; }
  std::span<const std::uint64_t> updated_in() const noexcept { return updated_in_; }

 private:
  // Of a layer whose gradients come.
  struct begun_layer {
    bool is_first = true;  // gradient of the layer in its step
    float missed_decay = 1;
  };

  template <rule Rule>
  void pass_by(const begun_layer& of, std::span<const float> gradient, float* x, float* v) const;

  lamina::layout model_;
  sgd_options options_;
  std::vector<float> velocity_;
  std::vector<std::uint64_t> updated_in_;
  std::vector<begun_layer> begun_;
};

}  // namespace lab
