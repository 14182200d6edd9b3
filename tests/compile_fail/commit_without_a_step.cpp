// SPDX-License-Identifier: MIT
// EXPECT: no member named

#include <vector>

#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  auto step = worker.add(std::vector<std::vector<float>>{{1, 2, 3}});
  step.select();
#ifdef LAMINA_SHOULD_FAIL
  worker.commit();
#else
  step.commit();
#endif
}
