// SPDX-License-Identifier: MIT
#include "optimizer.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

namespace resnet50_ps {
namespace {

enum class rule { plain, momentum, nesterov };

// Rule and decay are known to the compiler, so that each combination is one loop without branches.
template <rule Rule, bool Decay>
void pass(const sgd_options& options, std::span<const float> gradient, float* x, float* v) {
  const float rate = options.learning_rate;
  const float momentum = options.momentum;
  const float decay = options.weight_decay;
  const float* received = gradient.data();
  const std::size_t count = gradient.size();
  for (std::size_t i = 0; i < count; ++i) {
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
    : model_(model), options_(checked(options)), velocity_(options_.momentum == 0 ? 0 : model.elements()) {}

void sgd::update(std::size_t layer, std::size_t begin, std::span<const float> gradient,
                 std::span<float> parameters) {
  model_.check_size(layer, parameters.size());
  if (begin > parameters.size() || gradient.size() > parameters.size() - begin) {
    throw std::out_of_range("layer '" + model_[layer].name + "' has " + std::to_string(parameters.size()) +
                            " elements: no block of " + std::to_string(gradient.size()) + " begins at " +
                            std::to_string(begin));
  }
  float* x = parameters.data() + begin;
  if (options_.momentum == 0) {
    return options_.weight_decay == 0 ? pass<rule::plain, false>(options_, gradient, x, nullptr)
                                      : pass<rule::plain, true>(options_, gradient, x, nullptr);
  }
  float* v = velocity_.data() + model_.offset(layer) + begin;
  if (options_.nesterov) {
    return options_.weight_decay == 0 ? pass<rule::nesterov, false>(options_, gradient, x, v)
                                      : pass<rule::nesterov, true>(options_, gradient, x, v);
  }
  return options_.weight_decay == 0 ? pass<rule::momentum, false>(options_, gradient, x, v)
                                    : pass<rule::momentum, true>(options_, gradient, x, v);
}

void sgd::set_learning_rate(float rate) {
  check_learning_rate(rate);
  options_.learning_rate = rate;
}

}  // namespace resnet50_ps
