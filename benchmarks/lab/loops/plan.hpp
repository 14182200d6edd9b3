// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace lab {

/// What of a frame may be lost on its way, and what becomes of it.
struct loss_plan {
  bool is_lossy = false;             ///< frames are cut, and go over a way that loses some of them
  std::uint32_t bound_up_ppm = 0;    ///< p of gradients, in parts per million
  std::uint32_t bound_down_ppm = 0;  ///< of parameters
  std::uint64_t warm_up_steps = 0;   ///< in which both grow from zero
  bool returns_lost =
      true;  ///< gradients that were lost stay in the residual of their sender; false: they are gone
  unsigned max_losses = 3;  ///< a chunk of gradients that was lost so often in a row must arrive; 0: never
  bool has_tags = true;     ///< the smallest of each layer are dropped first
  std::size_t packet_data_bytes = 1416;  ///< what a packet has room for

  std::uint32_t bound_up(std::uint64_t step) const { return grown(bound_up_ppm, step); }
  std::uint32_t bound_down(std::uint64_t step) const { return grown(bound_down_ppm, step); }

 private:
  std::uint32_t grown(std::uint32_t ppm, std::uint64_t step) const {
    if (step >= warm_up_steps) return ppm;
    return static_cast<std::uint32_t>(ppm * step / warm_up_steps);
  }
};

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
  loss_plan losses = {};

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
  /// How much may be lost of the parameters that `step` begins with: nothing where replicas begin, or are compared or kept.
  std::uint32_t bound_down_before(std::uint64_t step) const {
    const bool must_be_whole = step == steps_done + 1 || is_over(step) || compares_replicas_before(step) ||
                               averages_statistics_before(step) || makes_checkpoint_after(step - 1);
    return must_be_whole ? 0 : losses.bound_down(step);
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

}  // namespace lab
