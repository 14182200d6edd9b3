// SPDX-License-Identifier: MIT
// EXPECT: lamina: the elements are neither float nor double. Pass a copy in one of them, for example std::vector<float>(t.begin(), t.end())

#include <vector>

#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const std::vector<int> t(3);
#ifdef LAMINA_SHOULD_FAIL
  worker.begin().add(0, t);
#else
  worker.begin().add(0, std::vector<float>(t.begin(), t.end()));
#endif
}
