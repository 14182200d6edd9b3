// SPDX-License-Identifier: MIT
#include "lamina/tensor.hpp"

#include <deque>
#include <list>
#include <optional>
#include <ranges>
#include <variant>

#include "../adapt/mdspan.hpp"
#include "catch.hpp"
#include "lamina/adapt/mdspan.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

namespace lamina_test::tensor_test {

// No range, taught by a specialisation.
struct handle {
  float* memory;
  std::size_t count;
};

// Knows its element type only at run time.
struct dynamic_tensor {
  std::variant<std::span<float>, std::span<double>> memory;
};

// A view whose data() is not where its elements begin, as that of an xtensor view.
struct offset_view {
  const float* begin() const { return memory + 2; }
  const float* end() const { return memory + 5; }
  const float* data() const { return memory; }
  std::size_t size() const { return 3; }

  const float* memory;
};

// May be without elements.
struct perhaps {
  std::vector<float> values;
  bool is_there;
};

// A contiguous range that a partial specialisation takes over.
template <class T>
struct ring : std::vector<T> {
  using std::vector<T>::vector;
};

}  // namespace lamina_test::tensor_test

template <class T>
requires std::same_as<T, lamina_test::tensor_test::ring<typename T::value_type>>
struct lamina::tensor_traits<T> {
  static auto elements(const T& t) { return std::span(t).first(1); }
};
template <>
struct lamina::tensor_traits<lamina_test::tensor_test::handle> {
  static auto elements(const lamina_test::tensor_test::handle& t) {
    return std::span<float>(t.memory, t.count);
  }
};
template <>
struct lamina::tensor_traits<lamina_test::tensor_test::dynamic_tensor> {
  static auto elements(const lamina_test::tensor_test::dynamic_tensor& t) { return t.memory; }
};
template <>
struct lamina::tensor_traits<lamina_test::tensor_test::perhaps> {
  static auto elements(const lamina_test::tensor_test::perhaps& t) { return std::span(t.values); }
  static bool has_value(const lamina_test::tensor_test::perhaps& t) { return t.is_there; }
};

namespace lamina_test::tensor_test {

static_assert(lamina::element<float> && lamina::element<double>);
static_assert(!lamina::element<int> && !lamina::element<long double> && !lamina::element<const float>);
static_assert(lamina::tensor<std::vector<float>> && lamina::tensor<const std::vector<double>>);
static_assert(lamina::tensor<std::span<const float>> && lamina::tensor<std::array<double, 3>>);
static_assert(lamina::tensor<float[4]> && lamina::tensor<handle> && lamina::tensor<const dynamic_tensor>);
static_assert(!lamina::tensor<std::list<float>> && !lamina::tensor<std::deque<float>>);
static_assert(lamina::tensor<std::optional<std::vector<float>>> &&
              lamina::tensor<const std::optional<handle>>);
static_assert(!lamina::tensor<std::optional<float>> && !lamina::tensor<std::optional<float*>>);
static_assert(!lamina::tensor<std::vector<float>*> && !lamina::tensor<handle*>);
static_assert(!lamina::tensor<std::vector<bool>> && !lamina::tensor<float> && !lamina::tensor<float*>);

TEMPLATE_TEST_CASE("tensor: contiguous ranges are read and written where they lie", "", float, double) {
  std::vector<TestType> vector = {1, 2, 3};
  const std::array<TestType, 2> array = {4, 5};
  TestType plain[4] = {6, 7, 8, 9};
  const auto check = [](const auto& tensor, const TestType* begin, std::size_t size) {
    CHECK(lamina::elements_of<TestType>(tensor).data() == begin);
    CHECK(lamina::elements_of<TestType>(tensor).size() == size);
  };
  check(vector, vector.data(), 3);
  check(array, array.data(), 2);
  check(plain, plain, 4);
  check(std::span<TestType>(plain, 3), plain, 3);
  check(std::span<const TestType, 2>(array), array.data(), 2);
  check(std::vector<TestType>{}, nullptr, 0);
  lamina::writable_elements_of<TestType>(vector)[1] = 20;
  lamina::writable_elements_of<TestType>(std::span(vector).subspan(2))[0] = 30;
  CHECK(vector == std::vector<TestType>{1, 20, 30});
}

TEST_CASE("tensor: what tensor_traits says of a type counts, a partial specialisation too, without a copy") {
  std::array<float, 6> memory = {1, 2, 3, 4, 5, 6};
  const handle tensor{memory.data(), 2};
  CHECK(lamina::elements_of<float>(tensor).data() == memory.data());
  CHECK(lamina::elements_of<float>(tensor).size() == 2);
  lamina::writable_elements_of<float>(handle{memory.data(), 3})[2] = 30;
  CHECK(memory[2] == 30);
  CHECK(lamina::elements_of<float>(ring<float>{1, 2, 3}).size() == 1);
  CHECK(lamina::elements_of<double>(ring<double>{1, 2, 3}).size() == 1);
  // A range begins at its begin(), whatever its data() says.
  static_assert(std::ranges::contiguous_range<offset_view>);
  const offset_view view{memory.data()};
  CHECK(lamina::elements_of<float>(view).data() == memory.data() + 2);
  CHECK(lamina::elements_of<float>(view).size() == 3);
}

TEST_CASE("tensor: an element type known at run time is checked at run time") {
  std::array<double, 2> memory = {1, 2};
  const dynamic_tensor tensor{std::span<double>(memory)};
  CHECK(lamina::elements_of<double>(tensor).data() == memory.data());
  CHECK(lamina::writable_elements_of<double>(tensor).size() == 2);
  CHECK_THROWS_AS(lamina::elements_of<float>(tensor), std::invalid_argument);
  const auto read = [&] { (void)lamina::writable_elements_of<float>(tensor); };
  CHECK(contains(message_of<std::invalid_argument>(read),
                 "element type at run time than the float asked for: pass a converted copy"));
}

TEST_CASE("tensor: a std::optional of a tensor is one that may not be there") {
  std::vector<float> values = {1, 2};
  std::optional<std::span<float>> given(values);
  CHECK(lamina::detail::has_value(given));
  CHECK(lamina::elements_of<float>(given).data() == values.data());
  lamina::writable_elements_of<float>(given)[1] = 5;
  CHECK(values.back() == 5);
  const std::optional<std::vector<float>> owner(values);
  CHECK(lamina::elements_of<float>(owner).data() == owner->data());
  given = std::nullopt;
  CHECK_FALSE(lamina::detail::has_value(given));
  const auto read = [&] { (void)lamina::elements_of<float>(given); };
  CHECK(contains(message_of<std::invalid_argument>(read), "no tensor"));
  CHECK_THROWS_AS(lamina::writable_elements_of<float>(given), std::invalid_argument);

  CHECK(lamina::detail::has_value(std::vector<float>{}));
  CHECK(lamina::detail::has_value(handle{nullptr, 0}));
  for (const bool is_there : {false, true}) {
    CHECK(lamina::detail::has_value(perhaps{{1}, is_there}) == is_there);
    CHECK(lamina::detail::has_value(std::optional<perhaps>(perhaps{{}, is_there})) == is_there);
  }
  std::array<double, 2> memory = {1, 2};
  const std::optional<const dynamic_tensor> dynamic = dynamic_tensor{std::span<double>(memory)};
  CHECK(lamina::elements_of<double>(dynamic).data() == memory.data());
}

TEST_CASE("view: a pointer with a shape is a tensor where it points") {
  std::vector<float> memory(24);
  const std::vector<std::int64_t> shape = {2, 3, 4};
  CHECK(lamina::view(memory.data(), shape).data() == memory.data());
  CHECK(lamina::view(memory.data(), shape).size() == 24);
  CHECK(lamina::view(memory.data(), {4, 6}).size() == 24);
  CHECK(lamina::view(memory.data(), {}).size() == 1);
  CHECK(lamina::view(memory.data(), {4, 0}).empty());
  static_assert(std::same_as<decltype(lamina::view(memory.data(), {1})), std::span<float>>);
  const float* constant = memory.data();
  static_assert(std::same_as<decltype(lamina::view(constant, shape)), std::span<const float>>);
  lamina::writable_elements_of<float>(lamina::view(memory.data(), shape))[23] = 5;
  CHECK(memory[23] == 5);
  CHECK(lamina::elements_of<float>(lamina::view(constant, shape))[23] == 5);
}

TEST_CASE("view: null pointers, negative dimensions and overflow are refused") {
  constexpr std::size_t largest = std::numeric_limits<std::size_t>::max();
  float* const null = nullptr;
  float one = 1;
  const auto refused = [](float* memory, const auto& shape, const char* named) {
    CHECK(contains(message_of<std::invalid_argument>([&] { (void)lamina::view(memory, shape); }), named));
  };
  refused(null, std::array{2, 3}, "null pointer where the shape has 6");
  refused(null, std::array<int, 0>{}, "null pointer");
  refused(&one, std::array{3, -1}, "negative dimension -1");
  refused(&one, std::array{0, -1}, "negative dimension -1");
  refused(&one, std::array<std::size_t, 2>{largest, 2}, "elements of the shape overflows");
  refused(&one, std::array<std::size_t, 2>{largest / 2, 1}, "bytes of the shape overflows");
  // A zero counts, wherever it stands, as in layer::elements.
  CHECK(lamina::view(null, {3, 0}).empty());
  CHECK(lamina::view(&one, {largest, 2, 0}).empty());
  CHECK(lamina::view(&one, {0, largest, 2}).empty());
}

TEST_CASE("tensor: a worker takes tensors of several types in one call") {
  const lamina::layout model = model_of({6, 4, 2, 3, 5, 1, 4});
  lamina::worker<float> worker(model, {.drop_ratio = 0});
  float raw[] = {1, 2, 3, 4, 5, 6};
  const std::vector<lamina::bfloat16> half(4, lamina::bfloat16{0x3f80});  // 1
  REQUIRE(worker.add({lamina::view(raw, {6}), half, std::array<float, 2>{7, 8}, handle{raw + 2, 3},
                      std::optional<std::vector<float>>{}, std::vector<float>{12}, mdspan(raw, 2, 2)}));
  const tensors<float> expected = {{1, 2, 3, 4, 5, 6}, {1, 1, 1, 1}, {7, 8}, {3, 4, 5}, {}, {12},
                                   {1, 2, 3, 4}};
  for (std::size_t l = 0; l < model.layers(); ++l) {
    if (l == 4) continue;  // it has no gradient in this step
    CHECK(same_bits(worker.residual()[l], expected[l]));
  }
  CHECK(worker.residual().is_clear(4));
}

}  // namespace lamina_test::tensor_test
