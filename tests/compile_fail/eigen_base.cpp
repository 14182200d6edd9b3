// SPDX-License-Identifier: MIT
// EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that

#include <Eigen/Core>

#include "lamina/adapt/eigen.hpp"
#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const Eigen::Vector3f a(1, 2, 3);
  const Eigen::MatrixBase<Eigen::Vector3f>& base = a;
#ifdef LAMINA_SHOULD_FAIL
  worker.begin().add(0, base);
#else
  worker.begin().add(0, base.eval());
#endif
}
