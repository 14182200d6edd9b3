// SPDX-License-Identifier: MIT
// EXPECT: lamina: the elements of this range do not lie in one piece of memory. Pass a contiguous copy, for example std::vector<float>(t.begin(), t.end())

#include <vector>

#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const std::vector<bool> t(3);
#ifdef LAMINA_SHOULD_FAIL
  worker.begin().add(0, t);
#else
  worker.begin().add(0, std::vector<float>(t.begin(), t.end()));
#endif
}
