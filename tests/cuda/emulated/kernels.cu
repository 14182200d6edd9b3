// SPDX-License-Identifier: MIT
// All kernels of a step, whose PTX ./ptx looks at.
#include <cstddef>
#include <span>

#include "lamina/cuda/lamina.cuh"

namespace {

template <class T, class F>
void step(const lamina::layout& model, std::span<std::byte> frame) {
  const lamina::cuda::on_stream execution(nullptr);
  lamina::cuda::worker<T, F> worker(model);
  worker.add(execution);
  worker.select(execution);
  worker.encode(execution, frame);
  worker.commit(execution);
  worker.restore(execution, frame.data());
}

}  // namespace

void all_kernels(const lamina::layout& model, std::span<std::byte> frame) {
  step<float, lamina::mean_abs>(model, frame);
  step<double, lamina::l2_norm>(model, frame);
}
