// SPDX-License-Identifier: MIT
#include <ATen/core/ivalue.h>  // first, or clang refuses the header below of Torch 1.13 in C++20

#include <ATen/ops/full.h>

#include <cstdio>
#include <lamina/adapt/torch.hpp>
#include <lamina/lamina.hpp>

int main() {
  const lamina::layout model({{"head", {10, 64}}});
  lamina::residual_accumulator<float> residual(model);
  const at::Tensor gradient = at::full({10, 64}, 2.0, at::kFloat);
  std::printf("%g\n", residual.accumulate(0, gradient, lamina::l1_norm{}));
}
