// SPDX-License-Identifier: MIT
#include "model/optimizer.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

namespace lab {
namespace {

using rule = sgd::rule;

// Rule and decay are known to the compiler, so that each combination is one loop without branches. `missed` is what x is
// multiplied by before, for the steps in which the layer had no gradient.
template <rule Rule, bool Decay>
void pass(const sgd_options& options, float missed, std::span<const float> gradient, float* x, float* v) {
  const float rate = options.learning_rate;
  const float momentum = options.momentum;
  const float decay = options.weight_decay;
  const float* received = gradient.data();
  const std::size_t count = gradient.size();
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (Decay) x[i] *= missed;
    const float g = Decay ? received[i] + decay * x[i] : received[i];
    if constexpr (Rule == rule::plain) {
      x[i] -= rate * g;
    } else {
      const float velocity = momentum * v[i] + g;
      v[i] = velocity;
      x[i] -= rate * (Rule == rule::nesterov ? g + momentum * velocity : velocity);
    }
  }
}

// A further gradient of a step that has had its decay.
template <rule Rule>
void pass_on(const sgd_options& options, std::span<const float> gradient, float* x, float* v) {
  const float rate = options.learning_rate;
  const float momentum = options.momentum;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float g = gradient[i];
    if constexpr (Rule != rule::plain) v[i] += g;
    x[i] -= rate * (Rule == rule::nesterov ? g + momentum * g : g);
  }
}

void require(bool holds, const char* option, const char* range, float value) {
  if (holds) return;
  throw std::invalid_argument(std::string(option) + " must be " + range + ", not " + std::to_string(value));
}

void check_learning_rate(float rate) {
  require(std::isfinite(rate) && rate >= 0, "learning_rate", "finite and 0 or more", rate);
}

sgd_options checked(const sgd_options& options) {
  check_learning_rate(options.learning_rate);
  // NaN compares with nothing, so it fails each of these.
  require(options.momentum >= 0 && options.momentum < 1, "momentum", "from 0 to below 1", options.momentum);
  require(std::isfinite(options.weight_decay) && options.weight_decay >= 0, "weight_decay",
          "finite and 0 or more", options.weight_decay);
  if (options.nesterov && options.momentum == 0) {
    throw std::invalid_argument("nesterov needs a momentum above 0");
  }
  return options;
}

}  // namespace

sgd::sgd(const lamina::layout& model, sgd_options options)
    : model_(model),
      options_(checked(options)),
      velocity_(options_.momentum == 0 ? 0 : model.elements()),
      updated_in_(model.layers()),
      begun_(model.layers()) {}

void sgd::begin(std::size_t layer, std::uint64_t step) {
  std::uint64_t& last = updated_in_.at(layer);
  if (step < last || step == 0) {
    throw std::invalid_argument("layer '" + model_[layer].name + "' has had a gradient in step " +
                                std::to_string(last) + ": there is none in step " + std::to_string(step));
  }
  begun_layer& begun = begun_[layer];
  begun = {.is_first = step > last};
  if (begun.is_first && step - last > 1) {
    const double kept = 1 - static_cast<double>(options_.learning_rate) * options_.weight_decay;
    begun.missed_decay = static_cast<float>(std::pow(kept, static_cast<double>(step - last - 1)));
  }
  last = step;
}

void sgd::update(std::size_t layer, std::size_t begin, std::span<const float> gradient,
                 std::span<float> parameters) {
  model_.check_size(layer, parameters.size());
  if (begin > parameters.size() || gradient.size() > parameters.size() - begin) {
    throw std::out_of_range("layer '" + model_[layer].name + "' has " + std::to_string(parameters.size()) +
                            " elements: no block of " + std::to_string(gradient.size()) + " begins at " +
                            std::to_string(begin));
  }
  const begun_layer& begun = begun_[layer];
  float* x = parameters.data() + begin;
  if (options_.momentum == 0) return pass_by<rule::plain>(begun, gradient, x, nullptr);
  float* v = velocity_.data() + model_.offset(layer) + begin;
  return options_.nesterov ? pass_by<rule::nesterov>(begun, gradient, x, v)
                           : pass_by<rule::momentum>(begun, gradient, x, v);
}

template <sgd::rule Rule>
void sgd::pass_by(const begun_layer& of, std::span<const float> gradient, float* x, float* v) const {
  if (!of.is_first) return pass_on<Rule>(options_, gradient, x, v);
  if (options_.weight_decay == 0) return pass<Rule, false>(options_, of.missed_decay, gradient, x, v);
  return pass<Rule, true>(options_, of.missed_decay, gradient, x, v);
}

void sgd::set_learning_rate(float rate) {
  check_learning_rate(rate);
  options_.learning_rate = rate;
}

}  // namespace lab
