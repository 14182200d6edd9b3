// SPDX-License-Identifier: MIT
#include "lamina/adapt/mdspan.hpp"

#include <cstddef>
#include <vector>

#include "adapted.hpp"
#include "mdspan.hpp"

#if __has_include(<mdspan>)
#include <mdspan>
#endif

namespace {

using lamina_test::adapted_values;
using lamina_test::mdspan;
using lamina_test::require_readable;
using lamina_test::require_tensor;

struct of_other_references : mdspan<float> {
  using reference = float;
};

static_assert(lamina::tensor<mdspan<float>> && lamina::tensor<const mdspan<const double>>);
static_assert(!lamina::tensor<of_other_references>);

}  // namespace

TEMPLATE_TEST_CASE("mdspan: what has no gaps is a tensor where it lies, in the order of its memory", "",
                   float, double) {
  auto memory = adapted_values<TestType>();
  const auto values = memory;
  mdspan<TestType> rows(memory.data(), 50, 100);
  require_tensor(rows, memory.data(), values);
  mdspan<TestType> columns(memory.data(), {{50, 100}, {1, 50}});
  require_tensor(columns, memory.data(), values);
  require_readable(mdspan<const TestType>(memory.data(), 50, 100), memory.data(), values);
  lamina::writable_elements_of<TestType>(mdspan<TestType>(memory.data(), 50, 100))[7] = 3;
  REQUIRE(memory[7] == 3);
  REQUIRE(lamina::elements_of<TestType>(mdspan<TestType>(nullptr, 0, 3)).empty());
}

TEST_CASE("mdspan: what has gaps, or an element twice, is refused with what to pass") {
  std::vector<float> memory(64);
  for (const mdspan<float>& each :
       {mdspan<float>(memory.data(), {{2, 3}, {4, 1}}), mdspan<float>(memory.data(), {{2, 3}, {3, 2}}),
        mdspan<float>(memory.data(), {{4, 4}, {0, 1}})}) {
    const auto read = [&] { (void)lamina::elements_of<float>(each); };
    const auto write = [&] { (void)lamina::writable_elements_of<float>(each); };
    REQUIRE(lamina_test::contains(lamina_test::message_of<std::invalid_argument>(read), "a contiguous copy"));
    REQUIRE(lamina_test::contains(lamina_test::message_of<std::invalid_argument>(write), "without gaps"));
  }
}

#if defined(__cpp_lib_mdspan)
TEST_CASE("mdspan: that of the standard library") {
  auto memory = adapted_values<float>();
  const auto values = memory;
  std::mdspan rows(memory.data(), 50, 100);
  require_tensor(rows, memory.data(), values);
  const std::layout_stride::mapping gaps(std::extents(2, 3), std::array{4, 1});
  const std::mdspan wide(memory.data(), gaps);
  REQUIRE_THROWS_AS(lamina::elements_of<float>(wide), std::invalid_argument);
  std::mdspan<float, std::extents<std::size_t>> scalar(memory.data());
  REQUIRE(lamina::elements_of<float>(scalar).size() == 1);
}
#endif
