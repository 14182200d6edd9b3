// SPDX-License-Identifier: MIT
// EXPECT: lamina: the elements are pointers or containers, not numbers. Pass the elements of one layer as one tensor, layer by layer

#include <vector>

#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const std::vector<std::vector<float>> t(1);
#ifdef LAMINA_SHOULD_FAIL
  worker.begin().add(0, t);
#else
  worker.begin().add(0, t[0]);
#endif
}
