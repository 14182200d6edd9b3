// SPDX-License-Identifier: MIT
// EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that

#include <Eigen/Core>

#include "lamina/adapt/eigen.hpp"
#include "lamina/residual.hpp"

int main() {
  lamina::residual_accumulator<float> residual(lamina::layout({{"a", {3}}}));
  const Eigen::Matrix3f a = Eigen::Matrix3f::Zero();
#ifdef LAMINA_SHOULD_FAIL
  residual.accumulate(0, a.row(1));
#else
  residual.accumulate(0, a.row(1).eval());
#endif
}
