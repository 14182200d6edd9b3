// SPDX-License-Identifier: MIT
// EXPECT: lamina: the elements are pointers or containers, not numbers. Pass the elements of one layer as one tensor, layer by layer

#include <span>
#include <vector>

#include "lamina/residual.hpp"

int main() {
  lamina::residual_accumulator<float> residual(lamina::layout({{"a", {3}}}));
  const std::vector<float*> t(1);
#ifdef LAMINA_SHOULD_FAIL
  residual.accumulate(0, t);
#else
  for (float* layer : t) residual.accumulate(0, std::span(layer, 3));
#endif
}
