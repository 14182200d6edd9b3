// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "in_turn.hpp"
#include "lamina/worker.hpp"
#include "model.hpp"

namespace lamina_benchmark {

/// What a server gets in a step: the frame of each worker.
struct frames_of_step {
  std::vector<std::span<const std::byte>> frames;
  double each_sends = 0;     ///< the share of the elements in a frame, the mean over the workers
  double together_send = 0;  ///< the share of the elements that are in at least one
};

/// Workers whose frames a server decodes in turn, each frame of a first step. The workers of a small number are those of a larger one,
/// too, which saves memory.
class senders {
 public:
  senders(const lamina::layout& model, double drop_ratio, std::size_t cache_bytes = last_level_cache_bytes(),
          std::size_t most_bytes = std::size_t{3'000'000'000})
      : model_(model), drop_ratio_(drop_ratio), cache_bytes_(cache_bytes), most_bytes_(most_bytes) {}

  /// So many steps of `workers` workers that the cache has no frame of one when its turn comes; fewer where they would take more than
  /// `most_bytes`. In a single step as large as that each frame is pushed out by the others.
  std::vector<frames_of_step> in_turn(std::size_t workers) {
    std::vector<frames_of_step> steps;
    for (sets_in_turn sets(cache_bytes_, most_bytes_); !sets.are_enough();) {
      steps.push_back(step(workers, steps.size()));
      sets.add(bytes_of(steps.back()));
    }
    return steps;
  }

  static std::size_t bytes_of(const frames_of_step& step) {
    std::size_t bytes = 0;
    for (const auto& frame : step.frames) bytes += frame.size();
    return bytes;
  }

 private:
  struct sent {
    std::vector<std::byte> bytes;
    std::vector<bool> layers;
  };

  frames_of_step step(std::size_t workers, std::size_t turn) {
    frames_of_step result;
    std::vector<bool> in_any(model_.layers());
    std::size_t elements = 0;
    std::size_t elements_of_all = 0;
    if (frames_.size() < workers) frames_.resize(workers);
    for (std::size_t worker = 0; worker < workers; ++worker) {
      std::vector<sent>& turns = frames_[worker];
      while (turns.size() <= turn) turns.push_back(encoded(worker, turns.size()));
      result.frames.emplace_back(turns[turn].bytes);
      for (std::size_t l = 0; l < model_.layers(); ++l) {
        if (!turns[turn].layers[l]) continue;
        elements_of_all += model_.sizes()[l];
        if (!in_any[l]) elements += model_.sizes()[l];
        in_any[l] = true;
      }
    }
    const auto all = static_cast<double>(model_.elements());
    result.each_sends = static_cast<double>(elements_of_all) / static_cast<double>(workers) / all;
    result.together_send = static_cast<double>(elements) / all;
    return result;
  }

  sent encoded(std::size_t worker, std::size_t turn) {
    if (gradient_.empty()) {
      gradient_.resize(model_.elements());
      write_gradient(model_, 1, gradient_, octaves);
    }
    lamina::worker<float> sender(model_,
                                 {.drop_ratio = drop_ratio_, .sender = static_cast<std::uint32_t>(worker)});
    const std::uint64_t seed = scrambled(scrambled(worker) + turn);
    auto step = sender.begin();
    for (std::size_t l = 0; l < model_.layers(); ++l)
      step.add(l, layer_of(std::as_const(gradient_), model_, l), noise(seed + l));
    sent result{step.frame().to_bytes(), std::vector<bool>(model_.layers())};
    for (std::size_t l = 0; l < model_.layers(); ++l) result.layers[l] = step.is_sent(l);
    return result;
  }

  // What the scale of a layer is multiplied by, from 1 to 4, for each worker and step anew. The value of a layer is a mean over its elements, so
  // noise of the elements would leave all workers with the same choice.
  static double noise(std::uint64_t number) {
    return std::exp2(2 * static_cast<double>(scrambled(number) >> 11U) * 0x1p-53);
  }

  // With seven, the noise and R = 0.95, workers send of ResNet-50 what they send in training: 6 % each, and 13 % four together.
  static constexpr std::uint64_t octaves = 7;

  lamina::layout model_;
  double drop_ratio_;
  std::size_t cache_bytes_;
  std::size_t most_bytes_;
  std::vector<float> gradient_;
  std::vector<std::vector<sent>> frames_;  // by worker and turn
};

}  // namespace lamina_benchmark
