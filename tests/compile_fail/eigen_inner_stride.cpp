// SPDX-License-Identifier: MIT
// EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that

#include <Eigen/Core>

#include "lamina/adapt/eigen.hpp"
#include "lamina/representative.hpp"

int main() {
  const float memory[6] = {};
  const Eigen::Map<const Eigen::Vector3f, 0, Eigen::InnerStride<2>> a(memory);
#ifdef LAMINA_SHOULD_FAIL
  lamina::mean_abs{}(a);
#else
  lamina::mean_abs{}(a.eval());
#endif
}
