// SPDX-License-Identifier: MIT
#include <cstdint>
#include <cstdio>
#include <lamina/adapt/dlpack.hpp>
#include <lamina/lamina.hpp>
#include <vector>

int main() {
  const lamina::layout model({{"head", {10, 64}}});
  lamina::worker<float, lamina::l1_norm> worker(model);
  auto step = worker.begin();
  std::vector<float> memory(640, 2.0f);
  std::vector<std::int64_t> shape = {10, 64};
  DLTensor gradient{};
  gradient.data = memory.data();
  gradient.device = {kDLCPU, 0};
  gradient.ndim = 2;
  gradient.dtype = {kDLFloat, 32, 1};
  gradient.shape = shape.data();
  step.add(0, gradient);
  std::printf("%g\n", step.values()[0]);
}
