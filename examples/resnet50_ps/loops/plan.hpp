// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

namespace resnet50_ps {

/// What is done in which step. The same on all ranks: it says which messages come next, and each waits for its own alone.
struct training_plan {
  std::uint64_t steps = 0;
  std::uint64_t steps_done = 0;  ///< of a run that resumes: it begins with the states of the workers
  bool agrees_on_selection =
      false;  ///< the workers average their layers' values and so all select the same layers
  bool evaluates = true;
  std::uint64_t evaluation_period_steps = 0;  ///< 0: at the end alone
  std::uint64_t hash_period_steps = 100;      ///< how often replicas are compared; 0: at the end alone
  std::uint64_t checkpoint_period_steps = 0;  ///< 0: never
  bool saves_model = false;                   ///< at the end

  /// Of the step after the last: parameters come for it, and reports go, but no gradients.
  bool is_over(std::uint64_t step) const { return step > steps; }
  /// At the beginning of `step`, before its gradients.
  bool evaluates_before(std::uint64_t step) const {
    return evaluates && (is_over(step) || is_due(evaluation_period_steps, step - 1));
  }
  bool saves_model_before(std::uint64_t step) const { return saves_model && is_over(step); }
  /// Both want the mean of the workers' batch-norm statistics.
  bool averages_statistics_before(std::uint64_t step) const {
    return evaluates_before(step) || saves_model_before(step);
  }
  bool compares_replicas_before(std::uint64_t step) const {
    return is_over(step) || is_due(hash_period_steps, step - 1);
  }
  /// At the end as well.
  bool makes_checkpoint_after(std::uint64_t step) const {
    return is_due(checkpoint_period_steps, step) || (checkpoint_period_steps > 0 && step == steps);
  }

 private:
  static bool is_due(std::uint64_t period_steps, std::uint64_t steps_done) {
    return period_steps > 0 && steps_done > 0 && steps_done % period_steps == 0;
  }
};

}  // namespace resnet50_ps
