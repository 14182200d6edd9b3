// SPDX-License-Identifier: MIT
// EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that

#include <Eigen/Core>

#include "lamina/adapt/eigen.hpp"
#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const Eigen::Matrix3f a = Eigen::Matrix3f::Zero();
#ifdef LAMINA_SHOULD_FAIL
  worker.begin().add(0, a.row(1));
#else
  worker.begin().add(0, a.row(1).eval());
#endif
}
