// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lamina/codec.hpp"
#include "method.hpp"

namespace lamina_baselines {

/// The k blocks of 256 elements with the largest norm, whole, whatever layer they are of; which ones, a bitmap says. The
/// message is lamina's frame of a layout whose layers are the blocks, in one piece.
/// Source: Fei et al., OmniReduce (SIGCOMM 2021), block-based sparsification, Block Top-k.
class block_sparse final : public error_feedback {
 public:
  block_sparse(const lamina::layout& model, double fraction, std::size_t block_elements = 256)
      : error_feedback(model),
        fraction_(checked_fraction(fraction)),
        blocks_(blocks_of(model, block_elements)),
        chosen_(blocks_),
        encoder_(blocks_),
        norms_(blocks_.layers()),
        order_(blocks_.layers()) {}

  void step(std::span<const float> gradient) override {
    begin_message();
    for (std::size_t l = 0; l < model().layers(); ++l) add(l, gradient);
    for (std::size_t b = 0; b < norms_.size(); ++b) {
      const std::span<const float> elements = block(b);
      float squares = 0;
#pragma omp simd reduction(+ : squares)
      for (std::size_t i = 0; i < elements.size(); ++i) squares += elements[i] * elements[i];
      norms_[b] = squares;
    }
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    const auto keep = static_cast<std::ptrdiff_t>(share_of(norms_.size(), fraction_));
    std::ranges::nth_element(order_, order_.begin() + keep, std::greater<>(),
                             [this](std::size_t b) { return norms_[b]; });
    chosen_.clear();
    for (const std::size_t b : std::span(order_).first(static_cast<std::size_t>(keep))) chosen_.send(b);
    const lamina::encoded_frame& frame =
        encoder_.encode({}, chosen_, [this](std::size_t b) { return block(b); });
    std::byte* to = extend(frame.size_bytes());
    frame.copy_to({to, frame.size_bytes()});
    for (std::size_t b = 0; b < norms_.size(); ++b) {
      if (chosen_.is_sent(b)) std::ranges::fill(mutable_block(b), 0.0F);
    }
    // The norms; of what is sent, the checksum, the copy and the clearing.
    touch(residual().size_bytes() + 4 * frame.size_bytes() + 6 * norms_.size() * sizeof(float));
  }

  void receive(std::span<float> sum) const override {
    const auto frame = lamina::decode<float>(message(), blocks_);
    for (std::size_t b = 0; b < blocks_.layers(); ++b) {
      if (frame.is_dropped(b)) continue;
      const std::span<const float> from = frame.layer(b);
      float* to = sum.data() + blocks_.offset(b);
      for (std::size_t i = 0; i < from.size(); ++i) to[i] += from[i];
    }
  }

  const lamina::layout& blocks() const {
    return blocks_;
  }

 private:
  static lamina::layout blocks_of(const lamina::layout& model, std::size_t block_elements) {
    std::vector<lamina::layer> blocks;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      for (std::size_t begin = 0; begin < model.sizes()[l]; begin += block_elements) {
        blocks.push_back({std::to_string(l) + ":" + std::to_string(begin),
                          {std::min(block_elements, model.sizes()[l] - begin)}});
      }
    }
    return lamina::layout(std::move(blocks));
  }

  std::span<float> mutable_block(std::size_t b) {
    return residual_memory().subspan(blocks_.offset(b), blocks_.sizes()[b]);
  }
  std::span<const float> block(std::size_t b) const {
    return residual().subspan(blocks_.offset(b), blocks_.sizes()[b]);
  }

  double fraction_;
  lamina::layout blocks_;
  lamina::selection chosen_;
  lamina::frame_encoder<float> encoder_;
  std::vector<float> norms_;
  std::vector<std::size_t> order_;
};

}  // namespace lamina_baselines
