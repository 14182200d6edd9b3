// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lab {

/// Half a cosine wave from the base rate, in the first step after the warm-up, to `final_fraction` of it in
/// step `steps` and beyond.
struct cosine_decay {
  std::uint64_t steps = 0;    ///< the last step; at least two more than the warm-up has
  double final_fraction = 0;  ///< from 0 to 1
};

/// The learning rate of each step: a linear warm-up from base / n in step 1 to base in step n, then the
/// decay, or base without one. It has no state, so a run that resumes asks for the step at which it goes on.
class learning_rate_schedule {
 public:
  /// `base` is finite and 0 or more; `warm_up_steps` is n, 0 for none. Throws std::invalid_argument that
  /// names the parameter which is out of its range or not a number.
  learning_rate_schedule(float base, std::optional<cosine_decay> decay, std::uint64_t warm_up_steps);

  /// The rate of `step`, counted from 1; throws std::invalid_argument for 0.
  float at(std::uint64_t step) const;

 private:
  float base_;
  std::optional<cosine_decay> decay_;
  std::uint64_t warm_up_steps_;
};

/// Reads "constant", "cosine" or "cosine:FINAL_FRACTION"; the cosine ends in step `steps`. Throws std::invalid_argument: for
/// any other text with the text and these forms, for a value out of its range as learning_rate_schedule does.
learning_rate_schedule parse_schedule(const std::string& text, float base, std::uint64_t steps,
                                      std::uint64_t warm_up_steps);

}  // namespace lab
