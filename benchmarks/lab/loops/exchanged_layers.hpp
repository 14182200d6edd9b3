// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/collectives/gathered_linear.hpp>
#include <lamina/collectives/plan.hpp>
#include <lamina/layout.hpp>
#include <optional>
#include <vector>

#include "model/replica.hpp"

namespace lab {

/// Which fully connected layers exchange their activations in place of their gradients.
enum class fc_exchange : std::uint8_t {
  gradients,    ///< none
  activations,  ///< all
  by_cost,      ///< those for which that moves fewer bytes
};

/// What workers exchange of a network, as the layers of a plan: the parts of its parameters, and of a fully connected layer that
/// exchanges its activations the inputs and errors of all workers, in place of weight and bias.
class exchanged_layers {
 public:
  using linear = lamina::collectives::gathered_linear_impl;

  /// The layers chosen are told to gather() so many rows a worker, until this ends.
  exchanged_layers(replica& local, std::size_t workers, fc_exchange how, std::size_t rows);
  exchanged_layers(const exchanged_layers&) = delete;
  exchanged_layers& operator=(const exchanged_layers&) = delete;
  ~exchanged_layers();

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
  const gathered_layer* gathered(std::size_t parameter) const;
  bool gathers_any() const { return !gathered_.empty(); }
  /// What part `part` of the replica's model is here; only where its gradient is exchanged.
  std::size_t number_of(std::size_t part) const { return numbers_[part]; }
  /// And back: the part; none of inputs and errors.
  std::optional<std::size_t> part_of(std::size_t number) const { return parts_[number]; }
  /// All of model(), in the order in which it becomes ready when the gradients of the parameters do in that one.
  std::vector<std::size_t> order(const std::vector<std::size_t>& parameters) const;

 private:
  std::vector<gathered_layer> gathered_;
  std::vector<std::optional<std::size_t>> gathered_of_;  // of each parameter
  std::vector<std::size_t> numbers_;
  std::vector<std::optional<std::size_t>> parts_;
  std::vector<std::vector<std::size_t>> numbers_of_;  // of each parameter
  std::vector<lamina::collectives::layer_class> classes_;
  lamina::layout model_;
};

}  // namespace lab
