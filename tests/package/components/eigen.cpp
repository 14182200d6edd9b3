// SPDX-License-Identifier: MIT
#include <Eigen/Core>
#include <cstdio>
#include <lamina/adapt/eigen.hpp>
#include <lamina/lamina.hpp>

int main() {
  const lamina::layout model({{"head", {10, 64}}});
  lamina::worker<float, lamina::l1_norm> worker(model);
  auto step = worker.begin();
  const Eigen::VectorXf gradient = Eigen::VectorXf::Constant(640, 2.0f);
  step.add(0, gradient);
  std::printf("%g\n", step.values()[0]);
}
