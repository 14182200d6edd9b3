// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lamina/lamina.hpp"

namespace soak {

/// What one run does: the command line, and what its seed chose.
struct setting {
  std::uint64_t seed = 1;
  std::size_t workers = 8;
  std::uint64_t rounds = 1000;
  bool is_synchronous = true;
  std::uint64_t checkpoint_every = 16;
  bool sends_fail = false;  // now and then a send does not arrive, and is not committed
  // Gradients go as packets over UDP, and each layer may lack some of them; else over the channel, whole.
  bool is_lossy = false;
  double inject_loss = 0;       // the share of the packets that is lost on purpose
  std::uint32_t bound_ppm = 0;  // of a layer's gradients
  std::string fault;            // what is broken on purpose; see main()
  lamina::worker_options options;
};

/// Empty, tiny, around a block, and a few blocks; so small that a round takes about a millisecond.
inline lamina::layout model() {
  const std::array<std::size_t, 10> sizes = {9000, 0, 1, 64, 4097, 333, 4096, 12, 63, 700};
  std::vector<lamina::layer> layers;
  for (const std::size_t size : sizes) layers.push_back({"layer" + std::to_string(layers.size()), {size}});
  return lamina::layout(std::move(layers));
}

/// Options by the seed. All of them keep the sums exact: see momentum.
inline setting setting_of(std::uint64_t seed, bool is_synchronous) {
  std::mt19937_64 random(seed * 2 + (is_synchronous ? 1 : 0));
  const auto one_of = [&](const auto&... choices) {
    return std::array{choices...}[random() % sizeof...(choices)];
  };
  setting chosen;
  chosen.seed = seed;
  chosen.is_synchronous = is_synchronous;
  chosen.sends_fail = random() % 2 == 0;
  lamina::worker_options& options = chosen.options;
  options.drop_ratio = one_of(0.0, 0.5, 0.9, 0.95, 0.99, 1.0);
  if (random() % 3 == 0) options.send_budget = one_of(0.02, 0.1, 0.4);
  options.warm_up_steps = one_of(0, 0, 50);
  options.search_every = one_of(1, 1, 7);
  options.at_least_every = one_of(0, 0, 3, 40);
  options.fragment_elements = one_of(0, 4096);
  options.payload =
      one_of(lamina::payload_type::as_is, lamina::payload_type::float16, lamina::payload_type::bfloat16,
             lamina::payload_type::int8, lamina::payload_type::int4, lamina::payload_type::ternary);
  options.non_finite = one_of(lamina::non_finite::refuse, lamina::non_finite::skip);
  options.by_score = random() % 4 == 0;
  if (random() % 3 == 0) {
    // Each step without a send adds a binary digit to the velocity: an age of 8 keeps them within a float.
    options.momentum = 0.5;
    options.at_least_every = 8;
  }
  return chosen;
}

/// The same run, with gradients as packets.
inline setting lossy(setting run, double inject_loss, std::uint32_t bound_ppm) {
  run.is_lossy = true;
  run.inject_loss = inject_loss;
  run.bound_ppm = bound_ppm;
  run.options.frame_checksum = lamina::frame_checksum::none;
  // What was lost once waits for another send of its part.
  if (run.options.momentum != 0) run.options.at_least_every = 4;
  return run;
}

/// The seed has chosen the rest.
inline std::string described(const setting& each) {
  std::ostringstream text;
  text << "seed " << each.seed << (each.is_synchronous ? " sync" : " async");
  if (each.is_lossy) text << " over UDP, loss " << each.inject_loss << ", bound " << each.bound_ppm << " ppm";
  return text.str();
}

/// splitmix64: a number that looks random for each worker, step and element.
inline std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111eb;
  return x ^ (x >> 31U);
}
inline std::uint64_t mixed(std::uint64_t seed, std::uint64_t worker, std::uint64_t step) {
  return mixed(mixed(mixed(seed) ^ worker) ^ step);
}

/// The gradient of one layer: integers with mean 0, layers of different magnitude that take turns in being quiet.
inline std::vector<float> gradient_of(const setting& run, const lamina::layout& model, std::uint64_t worker,
                                      std::uint64_t step, std::size_t layer) {
  const std::uint64_t key = mixed(run.seed, worker, step) + layer * 0x100000001;
  const int magnitude = std::array{1, 2, 8, 31}[(layer + step / 32) % 4];
  std::vector<float> gradient(model.sizes()[layer]);
  const bool is_quiet = key % 8 == 0;
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    bits = i % 8 == 0 ? mixed(key + i) : bits >> 8U;  // a byte an element
    const int number = static_cast<int>(bits % 256) * (2 * magnitude + 1) / 256 - magnitude;
    gradient[i] = is_quiet ? 0.0F : static_cast<float>(number);
  }
  return gradient;
}

/// Now and then one element of a gradient is NaN: layer and element.
inline std::optional<std::pair<std::size_t, std::size_t>> bad_element(const setting& run,
                                                                      const lamina::layout& model,
                                                                      std::uint64_t worker,
                                                                      std::uint64_t step) {
  const std::uint64_t draw = mixed(run.seed + 1, worker, step);
  const std::size_t layer = draw / 16 % model.layers();
  if (draw % 16 != 0 || model.sizes()[layer] == 0) return std::nullopt;
  return std::pair(layer, draw / 256 % model.sizes()[layer]);
}

/// Whether the worker's frame of this step is lost. Worker 0's never is, so that no step is without a frame.
inline bool send_fails(const setting& run, std::uint64_t worker, std::uint64_t step) {
  return run.sends_fail && worker != 0 && mixed(run.seed + 2, worker, step) % 16 == 0;
}
/// Whether the reply to this worker in this step is lost, so that the server encodes it again.
inline bool reply_fails(const setting& run, std::uint64_t worker, std::uint64_t step) {
  return run.sends_fail && mixed(run.seed + 3, worker, step) % 16 == 0;
}

inline bool is_checkpoint(const setting& run, std::uint64_t round) {
  return round % run.checkpoint_every == 0 || round == run.rounds;
}

}  // namespace soak
