// SPDX-License-Identifier: MIT
// EXPECT: lamina: not a tensor. Pass a contiguous range (std::span, std::vector, ...), include the adapter of your library from lamina/adapt/, or specialise lamina::tensor_traits for your type

#include <span>

#include "lamina/worker.hpp"

struct my_tensor {
  const float* data;
  std::size_t count;
};

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const my_tensor t{};
#ifdef LAMINA_SHOULD_FAIL
  worker.begin().add(0, t);
#else
  worker.begin().add(0, std::span(t.data, t.count));
#endif
}
