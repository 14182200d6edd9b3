// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "../baselines/method.hpp"
#include "lamina/lamina.hpp"
#include "model.hpp"

namespace lamina_benchmark {

/// lamina behind the interface of the others. The share is a budget, so that all send as much in the long run.
class lamina_method final : public lamina_baselines::method {
 public:
  /// `part_elements`: 0 for whole layers.
  lamina_method(const lamina::layout& model, double share, std::size_t part_elements)
      : compressor_(
            model,
            {.byte_budget = share, .part_elements = part_elements, .non_finite = lamina::non_finite::skip}) {}
  /// Everything, as that payload.
  lamina_method(const lamina::layout& model, lamina::payload_type payload)
      : compressor_(model, {.drop_ratio = 0, .non_finite = lamina::non_finite::skip, .payload = payload}) {}

  void step(std::span<const float> gradient) override {
    if (frame_ != nullptr) {
      cleared_bytes_ = frame_->size_bytes();
      compressor_.commit();  // only now, so that receive() can look at the frame
    }
    const lamina::layout& model = compressor_.model();
    for (std::size_t l = 0; l < model.layers(); ++l) compressor_.accumulate(l, layer_of(gradient, model, l));
    frame_ = &compressor_.encode();
  }
  std::size_t message_bytes() const override { return frame_->size_bytes(); }

  void receive(std::span<float> sum) const override {
    const lamina::layout& parts = compressor_.parts();
    const std::vector<std::byte> bytes = frame_->to_bytes();
    const auto frame = lamina::decode<float>(bytes, parts);
    for (std::size_t p = 0; p < parts.layers(); ++p) {
      if (frame.is_dropped(p)) continue;
      std::vector<float> from(parts.sizes()[p]);
      frame.copy(p, 0, std::span(from));
      float* to = sum.data() + parts.offset(p);
      for (std::size_t i = 0; i < from.size(); ++i) to[i] += from[i];
    }
  }

  // Reads the gradient, writes the residual, and reads it but for what was cleared; reads what is sent, for the checksum.
  std::size_t bytes_touched() const override {
    return 3 * compressor_.model().elements() * sizeof(float) - cleared_bytes_ + frame_->size_bytes();
  }

 private:
  lamina::gradient_compressor<float> compressor_;
  const lamina::encoded_frame* frame_ = nullptr;
  std::size_t cleared_bytes_ = 0;
};

}  // namespace lamina_benchmark
