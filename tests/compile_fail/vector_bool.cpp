// SPDX-License-Identifier: MIT
// EXPECT: lamina: the elements of this range do not lie in one piece of memory. Pass a contiguous copy, for example std::vector<float>(t.begin(), t.end())

#include <vector>

#include "lamina/residual.hpp"

int main() {
  lamina::residual_accumulator<float> residual(lamina::layout({{"a", {3}}}));
  const std::vector<bool> t(3);
#ifdef LAMINA_SHOULD_FAIL
  residual.accumulate(0, t);
#else
  residual.accumulate(0, std::vector<float>(t.begin(), t.end()));
#endif
}
