// SPDX-License-Identifier: MIT
// Compiled once for each instruction set, each time into a library of its own.
#include "worker.hpp"

#include <lamina/lamina.hpp>
#include <optional>
#include <string>
#include <vector>

namespace {

class lamina_worker final : public worker {
 public:
  lamina_worker(const lamina::layout& model, double drop_ratio)
      : worker_(model, {.drop_ratio = drop_ratio}) {}

  std::span<const std::byte> add(std::span<const std::span<const float>> gradients) override {
    step_.reset();
    step_ = worker_.add(gradients);
    bytes_ = step_->frame().to_bytes();
    return bytes_;
  }
  void commit() override { step_->commit(); }

 private:
  lamina::worker<float> worker_;
  std::optional<lamina::worker<float>::step> step_;
  std::vector<std::byte> bytes_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) worker* make_worker(
    std::span<const layer_description> model, double drop_ratio) {
  std::vector<lamina::layer> layers;
  layers.reserve(model.size());
  for (const layer_description& each : model) layers.push_back({std::string(each.name), {each.elements}});
  return new lamina_worker(lamina::layout(layers), drop_ratio);
}
