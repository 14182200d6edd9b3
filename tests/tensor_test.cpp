// SPDX-License-Identifier: MIT
#include "lamina/tensor.hpp"

#include <array>
#include <deque>
#include <list>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "catch.hpp"
#include "support.hpp"

namespace {

// No range, taught by a specialisation.
struct handle {
  float* memory;
  std::size_t count;
};

// Knows its element type only at run time.
struct dynamic_tensor {
  std::variant<std::span<float>, std::span<double>> memory;
};

}  // namespace

template <>
struct lamina::tensor_traits<handle> {
  static auto elements(const handle& t) { return std::span<float>(t.memory, t.count); }
};
template <>
struct lamina::tensor_traits<dynamic_tensor> {
  static auto elements(const dynamic_tensor& t) { return t.memory; }
};

static_assert(lamina::element<float> && lamina::element<double>);
static_assert(!lamina::element<int> && !lamina::element<long double> && !lamina::element<const float>);
static_assert(lamina::tensor<std::vector<float>> && lamina::tensor<const std::vector<double>>);
static_assert(lamina::tensor<std::span<const float>> && lamina::tensor<std::array<double, 3>>);
static_assert(lamina::tensor<float[4]> && lamina::tensor<handle> && lamina::tensor<const dynamic_tensor>);
static_assert(!lamina::tensor<std::list<float>> && !lamina::tensor<std::deque<float>>);
static_assert(!lamina::tensor<std::vector<bool>> && !lamina::tensor<float> && !lamina::tensor<float*>);

TEMPLATE_TEST_CASE("tensor: contiguous ranges are read where they lie", "", float, double) {
  const std::vector<TestType> vector = {1, 2, 3};
  const std::array<TestType, 2> array = {4, 5};
  TestType plain[4] = {6, 7, 8, 9};
  const std::span<TestType> span(plain, 3);
  const std::span<const TestType, 2> fixed(array);
  CHECK(lamina::elements_of<TestType>(vector).data() == vector.data());
  CHECK(lamina::elements_of<TestType>(vector).size() == 3);
  CHECK(lamina::elements_of<TestType>(array).data() == array.data());
  CHECK(lamina::elements_of<TestType>(array).size() == 2);
  CHECK(lamina::elements_of<TestType>(plain).data() == plain);
  CHECK(lamina::elements_of<TestType>(plain).size() == 4);
  CHECK(lamina::elements_of<TestType>(span).data() == plain);
  CHECK(lamina::elements_of<TestType>(span).size() == 3);
  CHECK(lamina::elements_of<TestType>(fixed).data() == array.data());
  CHECK(lamina::elements_of<TestType>(std::vector<TestType>{}).empty());
}

TEMPLATE_TEST_CASE("tensor: contiguous ranges are written where they lie, views also as rvalues", "", float,
                   double) {
  std::vector<TestType> vector = {1, 2, 3};
  lamina::writable_elements_of<TestType>(vector)[1] = 20;
  lamina::writable_elements_of<TestType>(std::span(vector).subspan(2))[0] = 30;
  CHECK(vector == std::vector<TestType>{1, 20, 30});
}

TEST_CASE("tensor: a type taught by tensor_traits is read and written without a copy") {
  std::array<float, 3> memory = {1, 2, 3};
  const handle tensor{memory.data(), 2};
  CHECK(lamina::elements_of<float>(tensor).data() == memory.data());
  CHECK(lamina::elements_of<float>(tensor).size() == 2);
  lamina::writable_elements_of<float>(handle{memory.data(), 3})[2] = 30;
  CHECK(memory[2] == 30);
}

TEST_CASE("tensor: an element type known at run time is checked at run time") {
  std::array<double, 2> memory = {1, 2};
  const dynamic_tensor tensor{std::span<double>(memory)};
  CHECK(lamina::elements_of<double>(tensor).data() == memory.data());
  CHECK(lamina::writable_elements_of<double>(tensor).size() == 2);
  CHECK_THROWS_AS(lamina::elements_of<float>(tensor), std::invalid_argument);
  const auto read = [&] { lamina::writable_elements_of<float>(tensor); };
  CHECK(lamina_test::contains(lamina_test::message_of<std::invalid_argument>(read), "element type"));
}
