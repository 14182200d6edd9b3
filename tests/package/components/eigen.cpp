// SPDX-License-Identifier: MIT
#include <Eigen/Core>
#include <cstdio>
#include <lamina/adapt/eigen.hpp>
#include <lamina/lamina.hpp>

int main() {
  const lamina::layout model({{"head", {10, 64}}});
  lamina::residual_accumulator<float> residual(model);
  const Eigen::VectorXf gradient = Eigen::VectorXf::Constant(640, 2.0f);
  std::printf("%g\n", residual.accumulate(0, gradient, lamina::l1_norm{}));
}
