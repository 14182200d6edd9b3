// SPDX-License-Identifier: MIT
// EXPECT: lamina: the tensor is const, or a view of const elements, and would be written to. Pass one that may be written

#include <Eigen/Core>

#include "lamina/adapt/eigen.hpp"
#include "lamina/codec.hpp"

int main() {
  const lamina::frame_view<float> frame;
  float memory[3] = {};
#ifdef LAMINA_SHOULD_FAIL
  frame.restore(0, Eigen::Map<const Eigen::Vector3f>(memory));
#else
  frame.restore(0, Eigen::Map<Eigen::Vector3f>(memory));
#endif
}
