// SPDX-License-Identifier: MIT
// EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that

#include <Eigen/Core>

#include "lamina/adapt/eigen.hpp"
#include "lamina/representative.hpp"

int main() {
  const Eigen::Vector3f a(1, 2, 3);
#ifdef LAMINA_SHOULD_FAIL
  lamina::mean_abs{}(2 * a + a);
#else
  lamina::mean_abs{}((2 * a + a).eval());
#endif
}
