// SPDX-License-Identifier: MIT
// EXPECT: lamina: the callable gives each layer as a container of its own, which is gone before the frame is sent. Give a reference or a std::span

#include <vector>

#include "lamina/codec.hpp"

int main() {
  const std::vector<std::vector<float>> parameters = {{1, 2, 3}};
  const lamina::layout model({{"a", {3}}});
  lamina::frame_encoder<float> encoder(model);
  const lamina::selection none(model);
#ifdef LAMINA_SHOULD_FAIL
  encoder.encode({}, none, [&](std::size_t l) { return parameters[l]; });
#else
  encoder.encode(
      {}, none, [&](std::size_t l) -> const auto& { return parameters[l]; });
#endif
}
