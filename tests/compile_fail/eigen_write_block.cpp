// SPDX-License-Identifier: MIT
// EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that

#include <Eigen/Core>

#include "lamina/adapt/eigen.hpp"
#include "lamina/codec.hpp"

int main() {
  const lamina::frame_view<float> frame;
  Eigen::Matrix3f a = Eigen::Matrix3f::Zero();
  Eigen::RowVector3f row;
#ifdef LAMINA_SHOULD_FAIL
  frame.restore(0, a.row(1));
#else
  frame.restore(0, row), a.row(1) = row;
#endif
}
