// SPDX-License-Identifier: MIT
#include <cstdio>
#include <lamina/cuda/lamina.cuh>
#include <vector>

// Compiled, and not called: there may be no GPU.
void step(lamina::cuda::worker<float>& worker, std::span<std::byte> frame) {
  const lamina::cuda::on_stream execution;
  worker.add(execution);
  worker.select(execution);
  worker.encode(execution, frame);
  worker.commit(execution);
}

int main() {
  const std::vector<std::size_t> shape = {10, 64};
  const lamina::cuda::device_tensor tensor(static_cast<float*>(nullptr), shape);
  std::printf("%zu\n", 2 * tensor.elements());
}
