// SPDX-License-Identifier: MIT
// Gradients in any container, several in one call.
#include <lamina/adapt/mdspan.hpp>
#include <lamina/half.hpp>
#include <lamina/tensor.hpp>
#include <lamina/worker.hpp>

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "../adapt/mdspan.hpp"
#include "catch.hpp"

namespace {

struct framework_tensor {
  std::vector<float> numbers;
};

}  // namespace

template <>
struct lamina::tensor_traits<framework_tensor> {
  static auto elements(const framework_tensor& t) { return std::span<const float>(t.numbers); }
  static auto elements(framework_tensor& t) { return std::span<float>(t.numbers); }
};

TEST_CASE("program: tensors of several types in one call") {
  const lamina::layout model(
      {{"a", {2, 3}}, {"b", {4}}, {"c", {2}}, {"d", {3}}, {"e", {5}}, {"f", {1}}, {"g", {2, 2}}});
  lamina::worker<float> worker(model, {.drop_ratio = 0});
  const float raw[] = {1, 2, 3, 4, 5, 6};
  const std::vector<lamina::bfloat16> half(4, lamina::bfloat16{0x3f80});  // 1
  auto step = worker.add({lamina::view(raw, {2, 3}), half, std::array<float, 2>{7, 8},
                          framework_tensor{{9, 10, 11}}, std::optional<std::vector<float>>{},
                          std::vector<float>{12}, lamina_test::mdspan(raw, 2, 2)});
  REQUIRE(step);
  const auto& residual = worker.residual();
  REQUIRE(std::vector<float>(residual[0].begin(), residual[0].end()) == std::vector<float>{1, 2, 3, 4, 5, 6});
  REQUIRE(std::vector<float>(residual[1].begin(), residual[1].end()) == std::vector<float>(4, 1));
  REQUIRE(std::vector<float>(residual[2].begin(), residual[2].end()) == std::vector<float>{7, 8});
  REQUIRE(std::vector<float>(residual[3].begin(), residual[3].end()) == std::vector<float>{9, 10, 11});
  REQUIRE(residual.is_clear(4));  // it has no gradient in this step
  REQUIRE(residual[5][0] == 12);
  REQUIRE(std::vector<float>(residual[6].begin(), residual[6].end()) == std::vector<float>{1, 2, 3, 4});
}
