// SPDX-License-Identifier: MIT
#include "lamina/adapt/xtensor.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include "accumulate.hpp"
#include "adapted.hpp"
#include "xtensor_headers.hpp"

namespace {

using lamina_test::adapted_values;
using lamina_test::require_readable;
using lamina_test::require_tensor;
using xt::layout_type;

constexpr std::size_t rows = 50;
constexpr std::size_t columns = 100;

template <class Tensor, class T>
Tensor filled(const std::vector<T>& values) {
  Tensor tensor(typename Tensor::shape_type{rows, columns});
  std::ranges::copy(values, tensor.data());
  return tensor;
}

}  // namespace

TEMPLATE_TEST_CASE("xtensor: containers are tensors where they lie", "", float, double) {
  const auto values = adapted_values<TestType>();
  auto array = filled<xt::xarray<TestType>>(values);
  require_tensor(array, array.data(), values);
  auto tensor = filled<xt::xtensor<TestType, 2>>(values);
  require_tensor(tensor, tensor.data(), values);
  xt::xtensor_fixed<TestType, xt::xshape<rows, columns>> fixed;
  std::ranges::copy(values, fixed.data());
  require_tensor(fixed, fixed.data(), values);
}

TEMPLATE_TEST_CASE("xtensor: column-major containers are taken in the order of their memory", "", float,
                   double) {
  const auto values = adapted_values<TestType>();
  auto array = filled<xt::xarray<TestType, layout_type::column_major>>(values);
  require_tensor(array, array.data(), values);
  auto tensor = filled<xt::xtensor<TestType, 2, layout_type::column_major>>(values);
  require_tensor(tensor, tensor.data(), values);
}

TEMPLATE_TEST_CASE("xtensor: adapted memory is a tensor, const memory to read", "", float, double) {
  auto memory = adapted_values<TestType>();
  const auto values = memory;
  const std::array<std::size_t, 2> shape = {rows, columns};
  auto vector = xt::adapt(memory, shape);
  require_tensor(vector, memory.data(), values);
  auto dynamic_rank = xt::adapt(memory, std::vector<std::size_t>{rows, columns});
  require_tensor(dynamic_rank, memory.data(), values);
  auto pointer = xt::adapt(memory.data(), memory.size(), xt::no_ownership(), shape);
  require_tensor(pointer, memory.data(), values);
  const auto constant = xt::adapt(values, shape);
  require_readable(constant, values.data(), values);
}

TEST_CASE("xtensor: containers without elements, of one element and of rank 0 are tensors") {
  const xt::xarray<float> empty = xt::zeros<float>({std::size_t{3}, std::size_t{0}});
  REQUIRE(lamina::elements_of<float>(empty).empty());
  REQUIRE(lamina::mean_abs{}(empty) == 0);
  const xt::xarray<float> scalar = -3.0F;
  REQUIRE(scalar.dimension() == 0);
  REQUIRE(lamina::elements_of<float>(scalar).size() == 1);
  REQUIRE(lamina::mean_abs{}(scalar) == 3);
}

TEST_CASE("xtensor: strides known at run time must be dense") {
  using dynamic = xt::xarray<float, layout_type::dynamic>;
  const auto values = adapted_values<float>(6);
  for (const layout_type order : {layout_type::row_major, layout_type::column_major}) {
    dynamic tensor(dynamic::shape_type{2, 3}, order);
    std::ranges::copy(values, tensor.data());
    require_tensor(tensor, tensor.data(), values);
  }
  // A dimension of 1 has stride 0 in xtensor.
  dynamic column(dynamic::shape_type{6, 1}, layout_type::row_major);
  std::ranges::copy(values, column.data());
  require_tensor(column, column.data(), values);

  const auto memory = adapted_values<float>(12);
  const auto strided = [&](std::vector<std::size_t> shape, std::vector<std::ptrdiff_t> strides) {
    return xt::adapt(memory, shape, strides);
  };
  require_readable(strided({3, 4}, {4, 1}), memory.data(), memory);
  require_readable(strided({3, 4}, {1, 3}), memory.data(), memory);
  for (const auto& gaps : {strided({2, 3}, {4, 1}), strided({2, 3}, {1, 4}), strided({3, 2}, {4, 2}),
                           strided({4, 3}, {0, 1}), strided({2, 2, 2}, {2, 4, 1})}) {
    const auto read = [&] { (void)lamina::elements_of<float>(gaps); };
    REQUIRE(lamina_test::contains(lamina_test::message_of<std::invalid_argument>(read),
                                  "assign it to an xt::xarray"));
    REQUIRE_THROWS_AS(lamina::mean_abs{}(gaps), std::invalid_argument);
  }
}

TEST_CASE("xtensor: an expression is not a tensor, its evaluation is") {
  const xt::xtensor<float, 1> a = {1, 2, 3};
  lamina::residual_accumulator<float> residual(lamina_test::model_of({3}));
  REQUIRE(lamina_test::accumulate(residual, 0, xt::eval(2 * a + a)) == 6);
  REQUIRE(lamina_test::same_bits(residual[0], std::array{3.0F, 6.0F, 9.0F}));
  static_assert(!lamina::tensor<decltype(2 * a + a)>);
  static_assert(!lamina::tensor<decltype(xt::view(a, xt::range(0, 2)))>);
  static_assert(!lamina::tensor<decltype(xt::transpose(a))>);
  // A container whose memory is in pieces.
  static_assert(!lamina::tensor<
                xt::xarray_container<std::deque<float>, layout_type::row_major, std::vector<std::size_t>>>);
}
