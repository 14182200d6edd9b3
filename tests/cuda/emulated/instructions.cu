// SPDX-License-Identifier: MIT
// ELEMENTS PASSES: adds one layer of float, for the emulator to count. Differences of two sizes and of two numbers of passes
// tell how many PTX instructions an element costs.
#include <thrust/device_vector.h>

#include <cstdlib>
#include <vector>

#include "lamina/cuda/lamina.cuh"

int main(int, char** arguments) {
  const std::size_t elements = std::strtoull(arguments[1], nullptr, 10);
  const lamina::cuda::on_stream execution;
  lamina::cuda::worker<float> worker(lamina::layout({{"layer", {elements}}}));
  const std::vector<thrust::device_vector<float>> gradients = {thrust::device_vector<float>(elements, 1.0F)};
  worker.bind(execution, gradients);
  // The residual is clear before the first, and is loaded from the second on.
  const int passes = std::atoi(arguments[2]);
  for (int pass = 0; pass < passes; ++pass) worker.add(execution);
  execution.wait();
}
