// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "../baselines/method.hpp"
#include "lamina/lamina.hpp"
#include "model.hpp"

namespace lamina_benchmark {

/// lamina behind the interface of the others. The share is a budget, so that all send as much in the long run.
class lamina_method final : public lamina_baselines::method {
 public:
  /// `fragment_elements`: 0 for whole layers.
  lamina_method(const lamina::layout& model, double share, std::size_t fragment_elements)
      : worker_(model, {.send_budget = share,
                        .fragment_elements = fragment_elements,
                        .non_finite = lamina::non_finite::skip}) {}
  /// Everything, as that payload.
  lamina_method(const lamina::layout& model, lamina::payload_type payload)
      : worker_(model, {.drop_ratio = 0, .non_finite = lamina::non_finite::skip, .payload = payload}) {}

  void step(std::span<const float> gradient) override {
    if (step_) {
      cleared_bytes_ = frame_->size_bytes();
      step_->commit();  // only now, so that receive() can look at the frame
    }
    const lamina::layout& model = worker_.model();
    step_.emplace(worker_.begin());
    for (std::size_t l = 0; l < model.layers(); ++l) step_->add(l, layer_of(gradient, model, l));
    frame_ = &step_->frame();
  }
  std::size_t message_bytes() const override { return frame_->size_bytes(); }

  void receive(std::span<float> sum) const override {
    const lamina::layout& fragments = worker_.fragments();
    const std::vector<std::byte> bytes = frame_->to_bytes();
    const auto frame = lamina::decode<float>(bytes, fragments);
    for (std::size_t f = 0; f < fragments.layers(); ++f) {
      if (frame.is_dropped(f)) continue;
      std::vector<float> from(fragments.sizes()[f]);
      frame.copy(f, 0, std::span(from));
      float* to = sum.data() + fragments.offset(f);
      for (std::size_t i = 0; i < from.size(); ++i) to[i] += from[i];
    }
  }

  // Reads the gradient, writes the residual, and reads it but for what was cleared; reads what is sent, for the checksum.
  std::size_t bytes_touched() const override {
    return 3 * worker_.model().elements() * sizeof(float) - cleared_bytes_ + frame_->size_bytes();
  }

 private:
  lamina::worker<float> worker_;
  std::optional<lamina::worker<float>::step> step_;
  const lamina::encoded_frame* frame_ = nullptr;
  std::size_t cleared_bytes_ = 0;
};

}  // namespace lamina_benchmark
