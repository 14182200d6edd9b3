// SPDX-License-Identifier: MIT
#include "lamina/adapt/eigen.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "adapted.hpp"

namespace {

using lamina_test::adapted_values;
using lamina_test::require_readable;
using lamina_test::require_tensor;

template <class T, int Order>
using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Order>;
template <class T>
using vector = Eigen::Matrix<T, Eigen::Dynamic, 1>;

template <class Tensor, class T>
void require_filled(Tensor tensor, const std::vector<T>& values) {
  std::ranges::copy(values, tensor.data());
  require_tensor(tensor, tensor.data(), values);
}

// Refused at run time, to read, to write and by the functors.
template <class Tensor>
void require_refused(Tensor&& tensor) {
  using T = typename std::remove_cvref_t<Tensor>::Scalar;
  const auto read = [&] { (void)lamina::elements_of<T>(tensor); };
  const auto write = [&] { (void)lamina::writable_elements_of<T>(tensor); };
  const auto reduce = [&] { lamina::mean_abs{}(tensor); };
  REQUIRE(lamina_test::contains(lamina_test::message_of<std::invalid_argument>(read), ".eval()"));
  REQUIRE(lamina_test::contains(lamina_test::message_of<std::invalid_argument>(write),
                                "write into an Eigen::Matrix"));
  REQUIRE(lamina_test::contains(lamina_test::message_of<std::invalid_argument>(reduce), ".eval()"));
}

}  // namespace

TEMPLATE_TEST_CASE("eigen: matrices and arrays are tensors where they lie, in the order of their memory", "",
                   float, double) {
  const auto values = adapted_values<TestType>();
  require_filled(matrix<TestType, Eigen::ColMajor>(50, 100), values);
  require_filled(matrix<TestType, Eigen::RowMajor>(50, 100), values);
  require_filled(vector<TestType>(5000), values);
  require_filled(Eigen::Array<TestType, Eigen::Dynamic, Eigen::Dynamic>(50, 100), values);
  require_filled(Eigen::Array<TestType, 1, Eigen::Dynamic>(5000), values);
  const auto twelve = adapted_values<TestType>(12);
  require_filled(Eigen::Matrix<TestType, 3, 4>(), twelve);
  require_filled(Eigen::Matrix<TestType, 3, 4, Eigen::RowMajor>(), twelve);
  require_filled(Eigen::Array<TestType, 12, 1>(), twelve);
  require_filled(Eigen::Matrix<TestType, Eigen::Dynamic, 4, 0, 8, 4>(3, 4), twelve);
  REQUIRE(lamina::elements_of<TestType>(matrix<TestType, 0>(0, 3)).empty());
  REQUIRE(lamina::mean_abs{}(Eigen::Matrix<TestType, 0, 0>()) == 0);
}

TEMPLATE_TEST_CASE("eigen: maps and refs are tensors where they lie, const ones to read", "", float, double) {
  auto memory = adapted_values<TestType>();
  const auto values = memory;
  using mapped = matrix<TestType, Eigen::ColMajor>;
  Eigen::Map<mapped> map(memory.data(), 50, 100);
  require_tensor(map, memory.data(), values);
  Eigen::Map<mapped, 0, Eigen::OuterStride<>> dense(memory.data(), 50, 100, Eigen::OuterStride<>(50));
  require_tensor(dense, memory.data(), values);
  Eigen::Ref<mapped> ref(map);
  require_tensor(ref, memory.data(), values);
  vector<TestType> owner = Eigen::Map<const vector<TestType>>(values.data(), 5000);
  Eigen::Ref<vector<TestType>> vector_ref(owner);
  require_tensor(vector_ref, owner.data(), values);
  require_readable(Eigen::Map<const mapped>(values.data(), 50, 100), values.data(), values);
  const Eigen::Ref<const mapped> constant(map);
  require_readable(constant, memory.data(), values);
  // Views, hence also as rvalues.
  lamina::writable_elements_of<TestType>(Eigen::Map<mapped>(memory.data(), 50, 100))[7] = 3;
  REQUIRE(memory[7] == 3);
}

TEST_CASE("eigen: what has no gaps is a tensor even as a block, transpose or view of another") {
  Eigen::MatrixXf m = Eigen::MatrixXf::Random(4, 6);
  const std::vector<float> all(m.data(), m.data() + 24);
  const std::vector<float> second(m.data() + 4, m.data() + 8);
  require_readable(m.col(1), m.data() + 4, second);
  require_readable(std::as_const(m).middleCols(1, 1), m.data() + 4, second);
  require_readable(m.middleCols(1, 5), m.data() + 4, std::vector<float>(m.data() + 4, m.data() + 24));
  require_readable(m.transpose(), m.data(), all);
  require_readable(m.array(), m.data(), all);
  require_readable(m.reshaped(), m.data(), all);
  require_readable(m.block(0, 0, 4, 6), m.data(), all);
  require_readable(m.col(1).segment(1, 2), m.data() + 5, std::vector<float>(m.data() + 5, m.data() + 7));
  require_readable(m.block(2, 3, 1, 1), m.data() + 14, std::vector<float>(1, m(2, 3)));
  auto column = m.col(2);
  require_tensor(column, m.data() + 8, std::vector<float>(m.data() + 8, m.data() + 12));
}

TEST_CASE("eigen: gaps that are known at run time are refused with what to write") {
  Eigen::MatrixXd m = Eigen::MatrixXd::Random(4, 6);
  require_refused(m.row(1));
  require_refused(m.topRows(2));
  require_refused(m.block(1, 1, 2, 2));
  require_refused(m.transpose().col(0));
  require_refused(m.diagonal());
  require_refused(Eigen::Ref<Eigen::MatrixXd>(m.topRows(2)));
  require_refused(
      Eigen::Map<Eigen::MatrixXd, 0, Eigen::OuterStride<>>(m.data(), 3, 4, Eigen::OuterStride<>(6)));
  require_refused(Eigen::Map<Eigen::VectorXd, 0, Eigen::InnerStride<>>(m.data(), 3, Eigen::InnerStride<>(2)));
  REQUIRE(lamina::elements_of<double>(m.row(1).eval()).size() == 6);
  // The stride of a dimension of 1 does not count.
  using strides = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  const Eigen::Map<Eigen::MatrixXd, 0, strides> flat(m.data(), 1, 6, strides(1, 3));
  require_readable(flat, m.data(), std::vector<double>(m.data(), m.data() + 6));
  Eigen::MatrixXd row = Eigen::MatrixXd::Random(1, 6);
  require_readable(row.row(0), row.data(), std::vector<double>(row.data(), row.data() + 6));
}

TEST_CASE("eigen: expressions, and gaps that are known at compile time, are no tensors") {
  const Eigen::MatrixXf m = Eigen::MatrixXf::Random(4, 6);
  const Eigen::Matrix4f fixed = Eigen::Matrix4f::Random();
  static_assert(!lamina::tensor<decltype(2 * m + m)> && !lamina::tensor<decltype(m * m.transpose())>);
  static_assert(!lamina::tensor<decltype(m.cast<double>())> &&
                !lamina::tensor<decltype(Eigen::MatrixXf::Zero(1, 1))>);
  static_assert(!lamina::tensor<decltype(fixed.row(1))> && lamina::tensor<decltype(fixed.col(1))>);
  static_assert(!lamina::tensor<decltype(fixed.topLeftCorner<2, 2>())>);
  static_assert(lamina::tensor<decltype(fixed.leftCols<2>())>);
  static_assert(!lamina::tensor<Eigen::Map<Eigen::Vector3f, 0, Eigen::InnerStride<2>>>);
  static_assert(!lamina::tensor<Eigen::DiagonalMatrix<float, 3>>);
  REQUIRE(lamina::mean_abs{}((2 * m + m).eval()) > 0);
  REQUIRE(lamina::mean_abs{}(fixed.row(1).eval()) > 0);
}
