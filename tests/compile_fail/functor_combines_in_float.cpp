// SPDX-License-Identifier: MIT
// EXPECT: { functor.combine(total, total) } -> std::same_as<double>;

#include <cstddef>
#include <vector>

#include "lamina/worker.hpp"

struct sum {
  float map(float x) const { return x; }
#ifdef LAMINA_SHOULD_FAIL
  float combine(float a, float b) const {
    return a + b;
  }
#else
  auto combine(auto a, auto b) const {
    return a + b;
  }
#endif
  double finish(double total, std::size_t) const {
    return total;
  }
};

int main() {
  lamina::worker<float, sum> worker(lamina::layout({{"a", {3}}}));
  worker.begin().add(0, std::vector<float>(3));
}
