// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint.hpp"
#include "lamina/lamina.hpp"
#include "setting.hpp"

namespace soak {

inline constexpr float learning_rate = 0.0625F;

inline std::vector<float> first_parameters(const lamina::layout& model) {
  std::vector<float> parameters(model.elements());
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i] = static_cast<float>(i % 17) - 8;
  return parameters;
}

/// What should be where, kept beside the library in double, where all sums of a run are exact: for each worker what it
/// has computed and the server has not received, which must be its residual; and what the model should be.
class books {
 public:
  books(const setting& run, const lamina::layout& model)
      : run_(run),
        model_(model),
        received_(model.elements()),
        outstanding_(run.workers),
        velocity_(run.workers) {
    for (std::size_t w = 0; w < run.workers; ++w) {
      outstanding_[w].resize(model.elements());
      velocity_[w].resize(model.elements());
    }
  }

  /// The worker has added its gradient of this step.
  void add_gradient(std::size_t worker, std::uint64_t step) {
    auto bad = bad_element(run_, model_, worker, step);
    if (run_.options.non_finite == lamina::non_finite::refuse) bad.reset();  // refused, and then sent good
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      const std::vector<float> gradient = gradient_of(run_, model_, worker, step, l);
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        if (bad == std::pair(l, i)) continue;
        const std::size_t at = model_.offset(l) + i;
        velocity_[worker][at] =
            run_.options.momentum * velocity_[worker][at] + static_cast<double>(gradient[i]);
        outstanding_[worker][at] += velocity_[worker][at];
      }
    }
  }

  /// The server has received this frame, with zeros where nothing arrived; nullptr: all of it has. Parts lie in the order of the layers, so
  /// their offsets are the model's.
  void take(std::size_t worker, const lamina::frame_view<float>& frame, const lamina::layout& parts,
            const lamina::delivery* arrived) {
    for (std::size_t part = 0; part < parts.layers(); ++part) {
      if (frame.is_dropped(part)) continue;
      sent_.resize(parts.sizes()[part]);
      frame.restore(part, sent_);
      for (std::size_t i = 0; i < sent_.size(); ++i) {
        const std::size_t at = parts.offset(part) + i;
        outstanding_[worker][at] -= static_cast<double>(sent_[i]);
        received_[at] += static_cast<double>(sent_[i]);
        if (arrived == nullptr) velocity_[worker][at] = 0;
      }
      if (arrived == nullptr) continue;
      arrived->for_each_delivered(part, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) velocity_[worker][parts.offset(part) + i] = 0;
      });
    }
  }

  /// Conservation: what was received and the residual are the sum of the gradients, ==. Throws with the number of
  /// elements that are not.
  void check_residual(std::size_t worker, std::span<const float> residual) const {
    std::size_t lost = residual.size() == model_.elements() ? 0 : model_.elements();
    for (std::size_t i = 0; i < residual.size() && residual.size() == model_.elements(); ++i) {
      lost += static_cast<double>(residual[i]) != outstanding_[worker][i];
    }
    if (lost > 0)
      throw std::runtime_error("worker " + std::to_string(worker) +
                               ": lost elements: " + std::to_string(lost));
  }

  /// The model is what plain SGD makes of everything received, ==. Not where a step went on without some workers: its
  /// mean is over those that came, and rounds.
  void check_parameters(const std::vector<float>& parameters) const {
    if (run_.is_synchronous && run_.sends_fail) return;
    const std::vector<float> first = first_parameters(model_);
    const double share = static_cast<double>(learning_rate) / static_cast<double>(run_.workers);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (static_cast<double>(parameters[i]) != static_cast<double>(first[i]) - share * received_[i]) {
        throw std::runtime_error("parameter " + std::to_string(i) + " is not what was received");
      }
    }
  }

  void save(file_writer& file) const {
    file.add(received_);
    for (std::size_t w = 0; w < run_.workers; ++w) {
      file.add(outstanding_[w]);
      file.add(velocity_[w]);
    }
  }
  void load(file_reader& file) {
    received_ = file.vector_of<double>();
    for (std::size_t w = 0; w < run_.workers; ++w) {
      outstanding_[w] = file.vector_of<double>();
      velocity_[w] = file.vector_of<double>();
    }
  }

 private:
  setting run_;
  lamina::layout model_;
  std::vector<double> received_;  // from all workers together
  std::vector<std::vector<double>> outstanding_;
  std::vector<std::vector<double>> velocity_;
  std::vector<float> sent_;
};

}  // namespace soak
