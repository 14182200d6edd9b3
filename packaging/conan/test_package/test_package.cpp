// SPDX-License-Identifier: MIT
#include <cstdio>
#include <lamina/lamina.hpp>

int main() {
  std::printf("lamina %d.%d.%d: checksum %s\n", LAMINA_VERSION_MAJOR, LAMINA_VERSION_MINOR,
              LAMINA_VERSION_PATCH, lamina::detail::checksum::available ? "yes" : "no");
}
