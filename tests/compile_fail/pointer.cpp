// SPDX-License-Identifier: MIT
// EXPECT: lamina: a pointer does not tell how many elements it points to. Pass lamina::view(pointer, shape) or std::span(pointer, count)

#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const float* pointer = nullptr;
#ifdef LAMINA_SHOULD_FAIL
  worker.begin().add(0, pointer);
#else
  worker.begin().add(0, lamina::view(pointer, {3}));
#endif
}
