// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/collectives/collectives.hpp>
#include <lamina/worker.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "loops/overlapped.hpp"
#include "loops/sliced_optimizer.hpp"
#include "messages/worker_group.hpp"
#include "model/optimizer.hpp"
#include "model/replica.hpp"
#include "network/prediction.hpp"
#include "records/metrics.hpp"
#include "records/stopwatch.hpp"

namespace lab {

/// The gradients of a step, from the hook of the backward pass to the parameters, as overlap_options say: in sums or with owners, all of
/// them or what a compressor has chosen a step ahead. All workers have one and call it alike.
class gradient_exchange {
 public:
  using residual_compressor = lamina::gradient_compressor<float>;

  /// `held_back` is null where everything is sent; all of these outlive this.
  gradient_exchange(worker_group& group, lamina::collectives::channel& over, replica& local,
                    const sgd_options& optimizer, residual_compressor* held_back,
                    const overlap_options& options);

  /// Before a plan: of a run that resumes, what the optimizers of all had.
  void take_up(std::vector<std::byte> optimizer) { saved_optimizer_ = std::move(optimizer); }
  /// With layers in the order in which their gradients become ready.
  void plan(const std::vector<std::size_t>& order);
  /// In place of that: with the plan of an earlier run. Throws plan_error, which begins with where it is from.
  void take_up_plan(const std::string& text, const std::string& from);
  [[nodiscard]] bool is_planned() const { return engine_.has_value(); }
  [[nodiscard]] const std::string& plan_text() const { return engine_->used_plan().save(); }

  /// After finish() of the step before.
  void begin_step(std::uint64_t step, float learning_rate);
  /// The gradient of a parameter is complete: what is exchanged of it goes on its way, or is held back. Throws non_finite_gradient.
  void hand_over(std::size_t parameter);
  /// Waits for a parameter of the step, unless it was taken: it is the new one.
  void take(std::size_t parameter);
  /// All of them.
  void finish();

  /// The forward pass begins, or the backward pass has ended.
  void note_begin() {
    since_begin_ = stopwatch();
    waited_before_ = waited_seconds();
  }
  void note_end() { step_seconds_ = computed_seconds(); }
  /// Of the step that was finished last.
  [[nodiscard]] overlap_metrics metrics() const;
  [[nodiscard]] std::size_t sent_bytes() const {
    return static_cast<std::size_t>(engine_->totals().sent_bytes - before_.sent_bytes);
  }

  /// The optimizer's state of all layers, on worker 0, as of a run in which each worker updates everything. Between steps.
  [[nodiscard]] std::vector<std::byte> gather_optimizer() const;

 private:
  [[nodiscard]] double waited_seconds() const { return engine_ ? engine_->totals().waited_seconds : 0.0; }
  // Since the forward pass began, without what was waited.
  [[nodiscard]] double computed_seconds() const {
    return since_begin_.seconds() - (waited_seconds() - waited_before_);
  }
  [[nodiscard]] double predicted_exposed() const;

  void begin(lamina::collectives::plan with);
  [[nodiscard]] owned_ranges ranges_of(std::size_t worker, bool has_what_all_have) const;
  void update_slice(std::size_t part, std::size_t begin, std::span<float> mean);

  worker_group& group_;
  lamina::collectives::channel& channel_;
  replica& local_;
  std::vector<torch::Tensor> parameters_;  // of the network
  residual_compressor* compressor_;
  const overlap_options& options_;
  sgd_options optimizer_options_;
  std::vector<std::byte> saved_optimizer_;  // until there is a plan, which says what is whose
  std::optional<sliced_optimizer>
      optimizer_;  // of the engine's thread while a step is open, but for parameters that have no owner
  std::vector<float> updated_;  // a slice
  std::vector<bool> is_open_;   // parameters that were handed over and not taken
  std::uint64_t step_ = 0;
  lamina::collectives::engine_totals before_;  // the step
  stopwatch since_begin_;
  double waited_before_ = 0;  // what begins with since_begin_
  // Of what is exchanged, and of a whole step, without what was waited.
  std::vector<double> needed_seconds_;
  std::vector<double> ready_seconds_;
  double step_seconds_ = 0;
  std::optional<step_prediction> prediction_;          // by the plan of the engine
  std::optional<lamina::collectives::engine> engine_;  // the last: its thread uses the others
};

}  // namespace lab
