// SPDX-License-Identifier: MIT
// A gradient of the framework whose component is linked, as LAMINA_TEST_COMPONENT names it.
#define LAMINA_TEST_xtensor 1
#define LAMINA_TEST_eigen 2
#define LAMINA_TEST_torch 3
#define LAMINA_TEST_dlpack 4

#if LAMINA_TEST_COMPONENT == LAMINA_TEST_xtensor
#include <lamina/adapt/xtensor.hpp>
#include <xtensor/xtensor.hpp>
const xt::xtensor<float, 2> gradient({10, 64}, 2.0f);
#elif LAMINA_TEST_COMPONENT == LAMINA_TEST_eigen
#include <Eigen/Core>
#include <lamina/adapt/eigen.hpp>
const Eigen::VectorXf gradient = Eigen::VectorXf::Constant(640, 2.0f);
#elif LAMINA_TEST_COMPONENT == LAMINA_TEST_torch
#include <ATen/core/ivalue.h>  // first, or clang refuses the header below of Torch 1.13 in C++20

#include <ATen/ops/full.h>
#include <lamina/adapt/torch.hpp>
const at::Tensor gradient = at::full({10, 64}, 2.0, at::kFloat);
#else
#include <cstdint>
#include <lamina/adapt/dlpack.hpp>
#include <vector>
std::vector<float> memory(640, 2.0f);
std::int64_t shape[] = {10, 64};
const DLTensor gradient = {memory.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 0};
#endif

#include <cstdio>
#include <lamina/lamina.hpp>

int main() {
  const lamina::layout model({{"head", {10, 64}}});
  lamina::worker<float, lamina::l1_norm> worker(model);
  auto step = worker.begin();
  step.add(0, gradient);
  std::printf("%g\n", step.values()[0]);
}
