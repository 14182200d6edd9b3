// SPDX-License-Identifier: MIT
// Compiled once for each instruction set, each time into a library of its own.
#include "worker.hpp"

#include <lamina/lamina.hpp>
#include <string>
#include <vector>

namespace {

class lamina_worker final : public worker {
 public:
  lamina_worker(const lamina::layout& model, double drop_ratio)
      : compressor_(model, {.drop_ratio = drop_ratio}) {}

  void accumulate(std::size_t layer, std::span<const float> gradient) override {
    compressor_.accumulate(layer, gradient);
  }
  std::span<const std::byte> encode() override {
    bytes_ = compressor_.encode().to_bytes();
    return bytes_;
  }
  void commit() override { compressor_.commit(); }

 private:
  lamina::gradient_compressor<float> compressor_;
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
