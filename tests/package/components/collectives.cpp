// SPDX-License-Identifier: MIT
#include <cstdio>
#include <lamina/collectives/collectives.hpp>
#include <numeric>
#include <vector>

namespace collectives = lamina::collectives;

int main() {
  const lamina::layout model({{"head", {10, 64}}});
  const collectives::plan plan(model, 2, std::vector<std::size_t>{0},
                               std::vector<collectives::layer_class>(1));
  collectives::memory_network network(2);
  collectives::engine one(network.of(0), plan);
  collectives::engine other(network.of(1), plan);
  for (collectives::engine* each : {&one, &other}) {
    each->begin_step();
    each->ready(0, std::vector<float>(640, each == &one ? 1.0F : 3.0F));
  }
  one.wait(0);
  other.wait(0);
  const auto mean = one.mean(0);
  std::printf("%g\n", std::accumulate(mean.begin(), mean.end(), 0.0));
}
