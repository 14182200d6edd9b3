// SPDX-License-Identifier: MIT
// All kernels of a step, whose PTX ./ptx looks at.
#include <cstddef>
#include <span>

#include "lamina/cuda/lamina.cuh"

namespace {

template <class T, class F>
void step(const lamina::layout& model, std::span<std::byte> frame) {
  const lamina::cuda::on_stream execution(nullptr);
  lamina::cuda::gradient_compressor<T, F> compressor(model);
  compressor.accumulate(execution);
  compressor.select(execution);
  compressor.encode(execution, frame);
  compressor.commit(execution);
  compressor.restore(execution, frame.data());
}

}  // namespace

void all_kernels(const lamina::layout& model, std::span<std::byte> frame) {
  step<float, lamina::mean_abs>(model, frame);
  step<double, lamina::l2_norm>(model, frame);
}
