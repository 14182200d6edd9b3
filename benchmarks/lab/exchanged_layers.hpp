// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <lamina/collectives/gathered_linear.hpp>
#include <lamina/collectives/plan.hpp>
#include <lamina/layout.hpp>
#include <optional>
#include <string>
#include <vector>

#include "replica.hpp"

namespace lab {

/// What workers exchange of a network, as the layers of a plan: the fragments of its parameters, and of a fully connected layer that
/// exchanges its activations the inputs and errors of all workers, in place of weight and bias.
class exchanged_layers {
 public:
  using linear = lamina::collectives::gathered_linear_impl;

  /// `how` is gradients, activations or by_cost. The layers chosen are told to gather() so many rows a worker.
  exchanged_layers(replica& local, std::size_t workers, const std::string& how, std::size_t rows);

  /// Names and sizes of what is exchanged, and its classes.
  const lamina::layout& model() const { return model_; }
  const std::vector<lamina::collectives::layer_class>& classes() const { return classes_; }

  /// Of a parameter whose activations are exchanged: the layer that has it, whose input is `input` of model() and whose errors follow.
  struct gathered_layer {
    linear* module = nullptr;
    std::size_t weight = 0;  ///< its parameters, by their numbers in the network
    std::optional<std::size_t> bias{};
    std::size_t input = 0;
  };
  /// Null where its gradient is exchanged.
  const gathered_layer* gathered(std::size_t parameter) const {
    return gathered_of_[parameter] ? &gathered_[*gathered_of_[parameter]] : nullptr;
  }
  /// What a fragment of the replica's model is here; only where its gradient is exchanged.
  std::size_t number_of(std::size_t fragment) const { return numbers_[fragment]; }
  /// And back: the fragment; none of inputs and errors.
  std::optional<std::size_t> fragment_of(std::size_t number) const { return fragments_[number]; }
  /// All that is exchanged of one parameter; nothing of a bias whose layer exchanges its activations.
  const std::vector<std::size_t>& numbers_of(std::size_t parameter) const { return numbers_of_[parameter]; }

 private:
  std::vector<gathered_layer> gathered_;
  std::vector<std::optional<std::size_t>> gathered_of_;  // of each parameter
  std::vector<std::size_t> numbers_;
  std::vector<std::optional<std::size_t>> fragments_;
  std::vector<std::vector<std::size_t>> numbers_of_;
  std::vector<lamina::collectives::layer_class> classes_;
  lamina::layout model_;
};

}  // namespace lab
