// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace resnet50_ps {

/// The base rate throughout.
struct constant_rate {};

/// Times `gamma` after every `every` steps, counted from the end of the warm-up.
struct step_decay {
  std::uint64_t every = 0;  ///< steps, 1 or more
  double gamma = 0.1;       ///< above 0, up to 1
};

/// Times `gamma` after each of these steps, which are counted from the beginning of training.
struct milestone_decay {
  std::vector<std::uint64_t> milestones;  ///< ascending, none within the warm-up
  double gamma = 0.1;                     ///< above 0, up to 1
};

/// Half a cosine wave from the base rate, in the first step after the warm-up, to `final_fraction` of it in
/// step `steps` and beyond.
struct cosine_decay {
  std::uint64_t steps = 0;    ///< the last step; at least two more than the warm-up has
  double final_fraction = 0;  ///< from 0 to 1
};

using rate_decay = std::variant<constant_rate, step_decay, milestone_decay, cosine_decay>;

/// The learning rate of each step: a linear warm-up from base / n in step 1 to base in step n, then the
/// decay. It has no state, so a run that resumes asks for the step at which it goes on.
class learning_rate_schedule {
 public:
  /// `base` is finite and 0 or more; `warm_up_steps` is n, 0 for none. Throws std::invalid_argument that
  /// names the parameter which is out of its range or not a number.
  learning_rate_schedule(float base, rate_decay decay, std::uint64_t warm_up_steps);

  /// The rate of `step`, counted from 1; throws std::invalid_argument for 0.
  float at(std::uint64_t step) const;

 private:
  float base_;
  rate_decay decay_;
  std::uint64_t warm_up_steps_;
};

/// Reads "constant", "step:EVERY:GAMMA", "milestones:S1,S2:GAMMA", "cosine" or "cosine:FINAL_FRACTION"; the
/// cosine ends in step `steps`. Throws std::invalid_argument: for any other text with the text and these
/// forms, for a value out of its range as learning_rate_schedule does.
learning_rate_schedule parse_schedule(const std::string& text, float base, std::uint64_t steps,
                                      std::uint64_t warm_up_steps);

}  // namespace resnet50_ps
