// SPDX-License-Identifier: MIT
// EXPECT: lamina: a pointer does not tell how many elements it points to. Pass lamina::view(pointer, shape) or std::span(pointer, count)

#include "lamina/residual.hpp"

int main() {
  lamina::residual_accumulator<float> residual(lamina::layout({{"a", {3}}}));
  const float* pointer = nullptr;
#ifdef LAMINA_SHOULD_FAIL
  residual.accumulate(0, pointer);
#else
  residual.accumulate(0, lamina::view(pointer, {3}));
#endif
}
