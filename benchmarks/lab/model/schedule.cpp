// SPDX-License-Identifier: MIT
#include "model/schedule.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace lab {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

// What share of the base rate remains in `step`, a step after the warm-up.
double share(const cosine_decay& decay, std::uint64_t step, std::uint64_t warm_up_steps) {
  const std::uint64_t first = warm_up_steps + 1;
  const double done = static_cast<double>(std::min(step, decay.steps) - first);
  const double progress = done / static_cast<double>(decay.steps - first);
  const double wave = (1 + std::cos(std::numbers::pi * progress)) / 2;
  return decay.final_fraction + (1 - decay.final_fraction) * wave;
}

}  // namespace

learning_rate_schedule::learning_rate_schedule(float base, std::optional<cosine_decay> decay,
                                               std::uint64_t warm_up_steps)
    : base_(base), decay_(decay), warm_up_steps_(warm_up_steps) {
  require(std::isfinite(base) && base >= 0, "base must be finite and 0 or more, not " + std::to_string(base));
  if (!decay) return;
  require(decay->steps > warm_up_steps && decay->steps - warm_up_steps >= 2,
          "steps of a cosine must be at least two more than the warm-up's " + std::to_string(warm_up_steps) +
              ", not " + std::to_string(decay->steps));
  // NaN compares with nothing, so it fails.
  require(decay->final_fraction >= 0 && decay->final_fraction <= 1,
          "final_fraction must be from 0 to 1, not " + std::to_string(decay->final_fraction));
}

float learning_rate_schedule::at(std::uint64_t step) const {
  require(step > 0, "step is counted from 1");
  double remaining = 1;
  if (step <= warm_up_steps_) {
    remaining = static_cast<double>(step) / static_cast<double>(warm_up_steps_);
  } else if (decay_) {
    remaining = share(*decay_, step, warm_up_steps_);
  }
  return static_cast<float>(static_cast<double>(base_) * remaining);
}

learning_rate_schedule parse_schedule(const std::string& text, float base, std::uint64_t steps,
                                      std::uint64_t warm_up_steps) {
  if (text == "constant") return {base, std::nullopt, warm_up_steps};
  cosine_decay cosine = {.steps = steps};
  if (text == "cosine") return {base, cosine, warm_up_steps};
  constexpr std::string_view prefix = "cosine:";
  const char* const end = text.data() + text.size();
  if (text.starts_with(prefix)) {
    const auto [stop, error] = std::from_chars(text.data() + prefix.size(), end, cosine.final_fraction);
    if (error == std::errc() && stop == end) return {base, cosine, warm_up_steps};
  }
  throw std::invalid_argument("schedule '" + text +
                              "' is none of constant, cosine and cosine:FINAL_FRACTION");
}

}  // namespace lab
