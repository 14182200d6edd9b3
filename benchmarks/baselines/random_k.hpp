// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "method.hpp"

namespace lamina_baselines {

/// k elements of each layer at random, all sets of k equally likely. The receiver draws the same positions from the same
/// seed, so that the numbers alone travel.
/// Source: Stich et al., Sparsified SGD with Memory (NeurIPS 2018).
class random_k final : public error_feedback {
 public:
  random_k(const lamina::layout& model, double fraction, std::uint64_t seed = 1)
      : error_feedback(model), fraction_(checked_fraction(fraction)), seed_(seed) {}

  void step(std::span<const float> gradient) override {
    begin_message();
    write(++seed_);
    for (std::size_t l = 0; l < model().layers(); ++l) {
      const std::span<float> residual = add(l, gradient);
      const std::size_t keep = share_of(residual.size(), fraction_);
      std::byte* to = extend(keep * sizeof(float));
      for_each_position(l, seed_, keep, [&](std::size_t i) {
        std::memcpy(to, &residual[i], sizeof(float));
        to += sizeof(float);
        residual[i] = 0;
      });
      touch(residual.size() / 4 + keep * (1 + 3 * sizeof(float)));
    }
  }

  void receive(std::span<float> sum) const override {
    message_reader reader(message());
    const auto seed = reader.read<std::uint64_t>();
    for (std::size_t l = 0; l < model().layers(); ++l) {
      float* to = sum.data() + model().offset(l);
      for_each_position(l, seed, share_of(model().sizes()[l], fraction_),
                        [&](std::size_t i) { to[i] += reader.read<float>(); });
    }
  }

 private:
  // Draws until there are enough different ones, marked in a bitmap; of more than half, those to leave out are drawn.
  template <class Visitor>
  void for_each_position(std::size_t layer, std::uint64_t seed, std::size_t keep,
                         const Visitor& visit) const {
    const std::size_t elements = model().sizes()[layer];
    std::mt19937_64 random(seed * 1'000'003 + layer);
    const bool leaves_out = 2 * keep > elements;
    marks_.assign((elements + 63) / 64, 0);
    for (std::size_t left = leaves_out ? elements - keep : keep; left > 0;) {
      __extension__ using wide = unsigned __int128;
      const auto i =
          static_cast<std::size_t>(wide{random()} * elements >> 64U);  // Lemire 2019, without its rejection
      const std::uint64_t bit = std::uint64_t{1} << (i % 64);
      left -= (marks_[i / 64] & bit) == 0 ? 1 : 0;
      marks_[i / 64] |= bit;
    }
    if (leaves_out) {
      for (std::uint64_t& word : marks_) word = ~word;
      if (elements % 64 != 0) marks_.back() &= (std::uint64_t{1} << (elements % 64)) - 1;
    }
    for (std::size_t word = 0; word < marks_.size(); ++word) {
      for (std::uint64_t bits = marks_[word]; bits != 0; bits &= bits - 1) {
        visit(64 * word + static_cast<std::size_t>(std::countr_zero(bits)));
      }
    }
  }

  double fraction_;
  std::uint64_t seed_;
  mutable std::vector<std::uint64_t> marks_;
};

}  // namespace lamina_baselines
