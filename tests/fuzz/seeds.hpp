// SPDX-License-Identifier: MIT
#pragma once

// Inputs to begin with: frames and states as the library writes them, frames of a small model with each bit flipped, and some bytes of
// any kind, which are choices to most targets.
#include <functional>

#include "fuzz.hpp"
#include "steps.hpp"

namespace lamina_fuzz::of_seeds {
namespace {

using taker = std::function<void(const std::string& target, const std::string& name, const bytes& input)>;
taker take;

void write(const std::string& target, const std::string& name, const std::vector<int>& choices,
           const bytes& rest) {
  bytes all;
  for (const int each : choices) all.push_back(static_cast<std::byte>(each));
  all.insert(all.end(), rest.begin(), rest.end());
  take(target, name, all);
}

template <class T>
void write_frames_and_states(int type) {
  for (const int which : {0, 1}) {
    const std::byte choice{static_cast<unsigned char>(which)};
    input in(std::span(&choice, 1));
    const lamina::layout& model = some_model(in);
    for (int payload = 0; payload < 4; ++payload) {
      std::mt19937 random(7);
      lamina::worker_options options;
      options.drop_ratio = 0.5;
      options.payload = static_cast<lamina::payload_type>(payload);
      if (payload % 2 == 1) options.momentum = 0.5;
      lamina::worker<T> worker(model, options);
      bytes frame;
      for (int t = 0; t < 2; ++t) {
        auto step = worker.add(lamina_test::rounding_gradients<T>(random, model));
        frame = step.frame().to_bytes();
        step.commit();
      }
      const std::string name = std::string(type == 1 ? "double" : "float") + "_model" +
                               std::to_string(which) + "_payload" + std::to_string(payload);
      write("decode", name, {type, which, 0, 0}, frame);
      for (std::size_t bit = 0; which == 1 && bit < 8 * frame.size(); ++bit) {
        bytes flipped = frame;
        flipped[bit / 8] ^= std::byte{1} << (bit % 8);
        write("decode", name + "_bit_" + std::to_string(bit), {type, which, 1, 0},
              flipped);  // and its checksum mended
      }
      // Of a run, the first of several, and with bytes of the user's.
      const std::vector<T> zeros(100);
      lamina::frame_encoder<T> of_a_run(model, 9);
      const bytes user(3, std::byte{7});
      for (const bool is_gradient : {true, false}) {
        lamina::selection some(model);
        some.send(0);
        const auto& other = of_a_run.encode(
            {.kind = is_gradient ? lamina::frame_kind::gradients : lamina::frame_kind::parameters,
             .step = 3,
             .sender = 1,
             .payload = options.payload,
             .is_last = !is_gradient,
             .user = user},
            some, [&](std::size_t l) { return std::span(zeros).first(model.sizes()[l]); });
        write("decode", name + (is_gradient ? "_gradients" : "_parameters"), {type, which, 0, 0},
              other.to_bytes());
      }
      std::vector<int> choices = {type, which, payload % 2, 0, 1, 0};
      choices.resize(choices.size() + 32);
      write("state", name, choices, worker.save());
    }
  }
}

}  // namespace

// Calls `all` with each.
inline void for_each_seed(const taker& all) {
  take = all;
  write_frames_and_states<float>(0);
  write_frames_and_states<double>(1);
  for (const std::string target :
       {"decode", "round_trip", "options", "state", "cluster", "packet", "control", "transfer"}) {
    // More for those whose assertions no other test makes of as many numbers.
    const bool is_of_choices = target == "round_trip" || target == "options" || target == "cluster";
    const std::size_t count = is_of_choices ? 96 : 24;
    std::mt19937 random(11);
    for (std::size_t k = 0; k < count; ++k) {
      bytes any(std::size_t{16} << k % 8);
      for (std::byte& each : any) each = static_cast<std::byte>(random());
      write(target, "any_" + std::to_string(k), {}, any);
    }
  }
}

}  // namespace lamina_fuzz::of_seeds
