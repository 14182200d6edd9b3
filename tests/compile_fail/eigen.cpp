// SPDX-License-Identifier: MIT
#include <Eigen/Core>

#include "cases.hpp"
#include "lamina/adapt/eigen.hpp"
#include "lamina/codec.hpp"
#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const lamina::frame_view<float> frame;
  const Eigen::Vector3f a(1, 2, 3);
  const Eigen::MatrixBase<Eigen::Vector3f>& base = a;
  float memory[6] = {};
  const Eigen::Map<const Eigen::Vector3f, 0, Eigen::InnerStride<2>> with_gaps(memory);
  Eigen::Matrix3f matrix = Eigen::Matrix3f::Zero();
  const Eigen::Matrix3f constant = matrix;
  Eigen::RowVector3f row;

  // clang-format off
  // EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that
  worker.begin().add(0, LAMINA_REFUSED(base) LAMINA_WANTED(base.eval()));
  // EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that
  worker.begin().add(0, LAMINA_REFUSED(2 * a + a) LAMINA_WANTED((2 * a + a).eval()));
  // EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that
  worker.begin().add(0, LAMINA_REFUSED(constant.row(1)) LAMINA_WANTED(constant.row(1).eval()));
  // EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that
  lamina::mean_abs{}(LAMINA_REFUSED(with_gaps) LAMINA_WANTED(with_gaps.eval()));
  // EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that
  lamina::mean_abs{}(LAMINA_REFUSED(a + a) LAMINA_WANTED((a + a).eval()));
  // EXPECT: lamina: an Eigen expression, or a block with gaps, has no elements in one piece of memory. Pass (expression).eval(); to write into a block, write into an Eigen::Matrix and assign that
  frame.restore(0, LAMINA_REFUSED(matrix.row(1)) LAMINA_WANTED(row));
  matrix.row(1) = row;
  // EXPECT: lamina: the tensor is const, or a view of const elements, and would be written to. Pass one that may be written
  frame.restore(0, Eigen::Map<LAMINA_REFUSED(const) Eigen::Vector3f>(memory));
  // clang-format on
}
