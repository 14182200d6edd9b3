// SPDX-License-Identifier: MIT
// A kernel whose name has lamina's namespace in it.
#include <lamina/options.hpp>

__global__ void kernel(lamina::payload_type) {}

void launch() {
  kernel<<<1, 1>>>(lamina::payload_type::as_is);
}
