// SPDX-License-Identifier: MIT
// Each adapter whose third party is installed and OpenMP, as every_class.cpp has the rest of the library. Not torch's adapter, in
// whose headers clang 14 finds errors.
#include <lamina/lamina.hpp>

#if __has_include(<dlpack/dlpack.h>)
#include "lamina/adapt/dlpack.hpp"
#define LAMINA_LINT_DLPACK
#endif
#if __has_include(<Eigen/Core>)
#include <Eigen/Core>

#include "lamina/adapt/eigen.hpp"
#define LAMINA_LINT_EIGEN
#endif
#if __has_include(<xtensor/xarray.hpp>)
#include <xtensor/xarray.hpp>

#include "lamina/adapt/xtensor.hpp"
#define LAMINA_LINT_XTENSOR
#endif

namespace {

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

}  // namespace

// Not in an unnamed namespace, or it would not be needed.
void lamina_lint_adapters(lamina::worker<float>& worker, const lamina::frame_view<float>& frame);
void lamina_lint_adapters(lamina::worker<float>& worker, const lamina::frame_view<float>& frame) {
#ifdef LAMINA_LINT_DLPACK
  DLTensor borrowed{};
  work(worker, frame, borrowed);
#endif
#ifdef LAMINA_LINT_EIGEN
  Eigen::MatrixXf matrix(2, 2);
  work(worker, frame, matrix);
#endif
#ifdef LAMINA_LINT_XTENSOR
  xt::xarray<float> array;
  work(worker, frame, array);
#endif
}
