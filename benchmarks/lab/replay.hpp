// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "options.hpp"
#include "replica.hpp"

/// Gradients of a real training run, kept in files, and workers that replay them in place of computing: so that an experiment on the network
/// needs no accelerator, and its seconds are not those of the processor at hand.
namespace lab {

struct step_report;

/// Fills the gradients of a replica, and the report on the batch.
using gradient_source = std::function<void(std::uint64_t step, step_report& report)>;

/// What a worker has its gradients of, where `compute` computes them: that, recorded if the options say so, or a recording.
gradient_source gradients_of(const options& how, std::size_t worker, const lamina::layout& model,
                             replica& local, gradient_source compute);

/// The recorded gradients of one worker, again and again; with more workers than were recorded, two of them have the same ones, one step
/// apart. Files of N floats in the order of the layout.
class recorded_gradients {
 public:
  /// Whether the directory holds any.
  static bool are_in(const std::string& directory);
  /// Throws std::runtime_error, naming the directory, if it holds no recording, and the file if it is of another model.
  recorded_gradients(const std::string& directory, std::size_t worker, const lamina::layout& model);
  /// Those of the next step.
  const std::vector<torch::Tensor>& next();

 private:
  std::vector<std::vector<torch::Tensor>> recorded_;
  std::size_t next_ = 0;
};

/// When, in a step of a real run, the parameters of each layer were needed and its gradient was complete: shares of the forward and of
/// the backward pass, in a file of the directory.
struct step_profile {
  double forward_share = 0;    ///< of the step
  std::vector<double> needed;  ///< of each layer, from 0 to 1
  std::vector<double> ready;   ///< likewise

  /// Times one call of `compute`, whose network has gates.
  static step_profile of(replica& local, const std::function<void()>& compute);
  /// Throw std::runtime_error that names the file; read() also where it is of another number of layers.
  void write(const std::string& directory) const;
  static step_profile read(const std::string& directory, std::size_t layers);
};

/// A step that takes its time layer by layer: forward waits at each gate of the network, and backward is one of autograd, in which each
/// gradient is complete when its share of the pass is over. What hooks and gates take comes on top.
///
/// Where it does not matter what the gradients are, since all of them are sent, they need not be recorded: they are then zeros, which share
/// one piece of memory that is never written, so that they take none.
class paced_player {
 public:
  /// Throws as recorded_gradients, unless it may replay zeros and none are recorded, and for a directory without a profile.
  paced_player(const std::string& directory, std::size_t worker, double compute_seconds,
               const lamina::layout& model, bool may_be_zeros);
  void play(replica& local);

 private:
  friend class paced_layer;
  void spend_until(double seconds, const std::function<void()>& work = {});
  // A tensor of its own, which autograd makes the parameter's.
  torch::Tensor gradient_of(std::size_t layer, const torch::Tensor& parameter);
  torch::Tensor zeros(torch::IntArrayRef shape);

  std::optional<recorded_gradients> recorded_;  // none: zeros
  torch::Tensor zeros_;                         // as many as were asked for
  step_profile profile_;
  std::vector<std::size_t> forward_;   // layers, in the order in which they are needed
  std::vector<std::size_t> backward_;  // and in which they are ready
  double compute_seconds_;
  const std::vector<torch::Tensor>* gradients_ = nullptr;  // of this step, where they are recorded
  double spent_ = 0;                                       // of it
  std::chrono::steady_clock::time_point due_;
  std::chrono::steady_clock::time_point woke_;
};

}  // namespace lab
