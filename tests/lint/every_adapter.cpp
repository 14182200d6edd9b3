// SPDX-License-Identifier: MIT
// Each adapter whose third party is installed and OpenMP, as every_class.cpp has the rest of the library. Not torch's adapter, in
// whose headers clang 14 finds errors.
#include <lamina/lamina.hpp>

// One gradient in, one layer out.
template <class Tensor>
void work(lamina::worker<float>& worker, const lamina::frame_view<float>& frame, Tensor& tensor) {
  auto step = worker.begin();
  step.add(0, tensor);
#if defined(_OPENMP)
  step.add(0, tensor, 1, lamina::openmp{2});
#endif
  frame.restore(0, tensor);
}

#if __has_include(<dlpack/dlpack.h>)
#include "lamina/adapt/dlpack.hpp"
template void work(lamina::worker<float>&, const lamina::frame_view<float>&, DLTensor&);
#endif
#if __has_include(<Eigen/Core>)
#include <Eigen/Core>

#include "lamina/adapt/eigen.hpp"
template void work(lamina::worker<float>&, const lamina::frame_view<float>&, Eigen::MatrixXf&);
#endif
#if __has_include(<xtensor/xarray.hpp>)
#include <xtensor/xarray.hpp>

#include "lamina/adapt/xtensor.hpp"
template void work(lamina::worker<float>&, const lamina::frame_view<float>&, xt::xarray<float>&);
#endif
