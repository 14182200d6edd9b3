// SPDX-License-Identifier: MIT
// EXPECT: deleted

#include <utility>
#include <vector>

#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  auto step = worker.add(std::vector<std::vector<float>>{{1, 2, 3}});
#ifdef LAMINA_SHOULD_FAIL
  auto other = step;
#else
  auto other = std::move(step);
#endif
  other.select();
}
