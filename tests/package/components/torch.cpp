// SPDX-License-Identifier: MIT
#include <ATen/core/ivalue.h>  // first, or clang refuses the header below of Torch 1.13 in C++20

#include <ATen/ops/full.h>

#include <cstdio>
#include <lamina/adapt/torch.hpp>
#include <lamina/lamina.hpp>

int main() {
  const lamina::layout model({{"head", {10, 64}}});
  lamina::worker<float, lamina::l1_norm> worker(model);
  auto step = worker.begin();
  const at::Tensor gradient = at::full({10, 64}, 2.0, at::kFloat);
  step.add(0, gradient);
  std::printf("%g\n", step.values()[0]);
}
