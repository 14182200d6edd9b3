// SPDX-License-Identifier: MIT
#include <cstdio>
#include <lamina/adapt/xtensor.hpp>
#include <lamina/lamina.hpp>
#include <xtensor/xtensor.hpp>

int main() {
  const lamina::layout model({{"head", {10, 64}}});
  lamina::residual_accumulator<float> residual(model);
  const xt::xtensor<float, 2> gradient({10, 64}, 2.0f);
  std::printf("%g\n", residual.accumulate(0, gradient, lamina::l1_norm{}));
}
