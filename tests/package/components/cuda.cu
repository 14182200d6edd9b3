// SPDX-License-Identifier: MIT
#include <cstdio>
#include <lamina/cuda/lamina.cuh>
#include <vector>

// Compiled, and not called: there may be no GPU.
void step(lamina::cuda::gradient_compressor<float>& compressor, std::span<std::byte> frame) {
  const lamina::cuda::on_stream execution;
  compressor.accumulate(execution);
  compressor.select(execution);
  compressor.encode(execution, frame);
  compressor.commit(execution);
}

int main() {
  const std::vector<std::size_t> shape = {10, 64};
  const lamina::cuda::device_tensor tensor(static_cast<float*>(nullptr), shape);
  std::printf("%zu\n", 2 * tensor.elements());
}
