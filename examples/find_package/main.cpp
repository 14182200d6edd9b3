// SPDX-License-Identifier: MIT
#include <cstdio>
#include <lamina/lamina.hpp>
#include <vector>

int main() {
  const std::vector<double> values = {0.5, 0.1, 0.3};
  const std::vector<std::size_t> sizes = {10, 80, 10};
  std::printf("lamina %d.%d.%d: threshold %g\n", LAMINA_VERSION_MAJOR, LAMINA_VERSION_MINOR,
              LAMINA_VERSION_PATCH, lamina::search_threshold(values, sizes, 0.85));
}
