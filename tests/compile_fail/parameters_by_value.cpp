// SPDX-License-Identifier: MIT
// EXPECT: lamina: the callable gives each layer as a container of its own, which is gone before the frame is sent. Give a reference or a std::span

#include <vector>

#include "lamina/publisher.hpp"

int main() {
  const std::vector<std::vector<float>> parameters = {{1, 2, 3}};
  lamina::parameter_publisher<float> publisher(lamina::layout({{"a", {3}}}), 1);
#ifdef LAMINA_SHOULD_FAIL
  (void)publisher.encode(0, 1, [&](std::size_t l) { return parameters[l]; });
#else
  (void)publisher.encode(0, 1, [&](std::size_t l) -> const std::vector<float>& { return parameters[l]; });
#endif
}
