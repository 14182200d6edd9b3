// SPDX-License-Identifier: MIT
#include <cstdio>
#include <lamina/lamina.hpp>
#include <vector>

int main() {
  lamina::worker<float> worker(lamina::layout({{"head", {16}}}));
  auto step = worker.add({std::vector<float>(16, 1.0F)});
  std::printf("lamina %d.%d.%d: a frame of %zu bytes\n", LAMINA_VERSION_MAJOR, LAMINA_VERSION_MINOR,
              LAMINA_VERSION_PATCH, step.frame().size_bytes());
}
