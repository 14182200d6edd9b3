// SPDX-License-Identifier: MIT
#include "model/schedule.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <numbers>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

namespace resnet50_ps {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

// NaN compares with nothing, so it fails each of these ranges.
void check_gamma(double gamma) {
  require(gamma > 0 && gamma <= 1, "gamma must be above 0 and up to 1, not " + std::to_string(gamma));
}

void check(const constant_rate&, std::uint64_t) {}

void check(const step_decay& decay, std::uint64_t) {
  require(decay.every > 0, "every must be 1 step or more, not 0");
  check_gamma(decay.gamma);
}

void check(const milestone_decay& decay, std::uint64_t warm_up_steps) {
  const std::vector<std::uint64_t>& steps = decay.milestones;
  require(!steps.empty(), "milestones must name a step");
  require(std::ranges::adjacent_find(steps, std::greater_equal()) == steps.end(),
          "milestones must be ascending");
  require(steps.front() > 0, "milestones are counted from 1");
  require(steps.front() >= warm_up_steps,
          "milestones must not lie within the warm-up: " + std::to_string(steps.front()) +
              " is before step " + std::to_string(warm_up_steps));
  check_gamma(decay.gamma);
}

void check(const cosine_decay& decay, std::uint64_t warm_up_steps) {
  require(decay.steps > warm_up_steps && decay.steps - warm_up_steps >= 2,
          "steps of a cosine must be at least two more than the warm-up's " + std::to_string(warm_up_steps) +
              ", not " + std::to_string(decay.steps));
  require(decay.final_fraction >= 0 && decay.final_fraction <= 1,
          "final_fraction must be from 0 to 1, not " + std::to_string(decay.final_fraction));
}

// What share of the base rate remains in `step`, a step after the warm-up.
double share(const constant_rate&, std::uint64_t, std::uint64_t) {
  return 1;
}

double share(const step_decay& decay, std::uint64_t step, std::uint64_t warm_up_steps) {
  const std::uint64_t passed = (step - warm_up_steps - 1) / decay.every;
  return std::pow(decay.gamma, static_cast<double>(passed));
}

double share(const milestone_decay& decay, std::uint64_t step, std::uint64_t) {
  const auto passed = std::ranges::lower_bound(decay.milestones, step) - decay.milestones.begin();
  return std::pow(decay.gamma, static_cast<double>(passed));
}

double share(const cosine_decay& decay, std::uint64_t step, std::uint64_t warm_up_steps) {
  const std::uint64_t first = warm_up_steps + 1;
  const double done = static_cast<double>(std::min(step, decay.steps) - first);
  const double progress = done / static_cast<double>(decay.steps - first);
  const double wave = (1 + std::cos(std::numbers::pi * progress)) / 2;
  return decay.final_fraction + (1 - decay.final_fraction) * wave;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t end = 0; end != std::string_view::npos;) {
    end = text.find(separator);
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return parts;
}

// All of `text` as a number, or nothing.
template <class Number>
std::optional<Number> number(std::string_view text) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end ? std::optional(value) : std::nullopt;
}

std::optional<std::vector<std::uint64_t>> numbers(std::string_view text) {
  std::vector<std::uint64_t> values;
  for (const std::string_view part : split(text, ',')) {
    const auto value = number<std::uint64_t>(part);
    if (!value) return std::nullopt;
    values.push_back(*value);
  }
  return values;
}

std::optional<rate_decay> parse_decay(std::string_view text, std::uint64_t steps) {
  const std::vector<std::string_view> parts = split(text, ':');
  const std::string_view kind = parts.front();
  if (kind == "constant" && parts.size() == 1) return constant_rate();
  if (kind == "cosine" && parts.size() == 1) return cosine_decay{.steps = steps};
  if (kind == "cosine" && parts.size() == 2) {
    if (const auto fraction = number<double>(parts[1])) return cosine_decay{steps, *fraction};
  }
  if (parts.size() != 3) return std::nullopt;
  const auto gamma = number<double>(parts[2]);
  if (!gamma) return std::nullopt;
  if (kind == "step") {
    if (const auto every = number<std::uint64_t>(parts[1])) return step_decay{*every, *gamma};
  }
  if (kind == "milestones") {
    if (auto milestones = numbers(parts[1])) return milestone_decay{std::move(*milestones), *gamma};
  }
  return std::nullopt;
}

}  // namespace

learning_rate_schedule::learning_rate_schedule(float base, rate_decay decay, std::uint64_t warm_up_steps)
    : base_(base), decay_(std::move(decay)), warm_up_steps_(warm_up_steps) {
  require(std::isfinite(base) && base >= 0, "base must be finite and 0 or more, not " + std::to_string(base));
  std::visit([&](const auto& kind) { check(kind, warm_up_steps); }, decay_);
}

float learning_rate_schedule::at(std::uint64_t step) const {
  require(step > 0, "step is counted from 1");
  const double remaining =
      step <= warm_up_steps_
          ? static_cast<double>(step) / static_cast<double>(warm_up_steps_)
          : std::visit([&](const auto& kind) { return share(kind, step, warm_up_steps_); }, decay_);
  return static_cast<float>(static_cast<double>(base_) * remaining);
}

learning_rate_schedule parse_schedule(const std::string& text, float base, std::uint64_t steps,
                                      std::uint64_t warm_up_steps) {
  std::optional<rate_decay> decay = parse_decay(text, steps);
  require(decay.has_value(), "schedule '" + text +
                                 "' is none of constant, step:EVERY:GAMMA, milestones:S1,S2:GAMMA, cosine "
                                 "and cosine:FINAL_FRACTION");
  return {base, std::move(*decay), warm_up_steps};
}

}  // namespace resnet50_ps
