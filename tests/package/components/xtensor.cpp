// SPDX-License-Identifier: MIT
#include <cstdio>
#include <lamina/adapt/xtensor.hpp>
#include <lamina/lamina.hpp>
#include <xtensor/xtensor.hpp>

int main() {
  const lamina::layout model({{"head", {10, 64}}});
  lamina::worker<float, lamina::l1_norm> worker(model);
  auto step = worker.begin();
  const xt::xtensor<float, 2> gradient({10, 64}, 2.0f);
  step.add(0, gradient);
  std::printf("%g\n", step.values()[0]);
}
