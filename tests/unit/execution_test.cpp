// SPDX-License-Identifier: MIT
#include "lamina/execution.hpp"

#include <cstddef>
#include <vector>

#include "catch.hpp"

namespace lamina_test::execution_test {

namespace {

struct pool {
  std::size_t size;
  [[nodiscard]] std::size_t threads() const { return size; }
  template <class Work>
  void operator()(std::size_t tasks, Work&& work) const {
    for (std::size_t i = tasks; i > 0; --i) work(i - 1);
  }
};

}  // namespace

TEST_CASE("execution: what runs tasks is one, and is heard if it says how many threads it has") {
  const auto lambda = [](std::size_t tasks, auto&& work) {
    for (std::size_t i = 0; i < tasks; ++i) work(i);
  };
  struct with_a_member {
    int threads = 4;  // a number and no function: not what is meant
  };
  STATIC_REQUIRE(lamina::execution<pool>);
  STATIC_REQUIRE(lamina::execution<decltype(lambda)>);
  STATIC_REQUIRE(lamina::execution<lamina::sequential>);
  STATIC_REQUIRE_FALSE(lamina::execution<int>);
  CHECK(lamina::detail::threads_of(pool{7}) == 7);
  CHECK(lamina::detail::threads_of(lamina::sequential{}) == 1);
  CHECK(lamina::detail::threads_of(lambda) == 0);
  CHECK(lamina::detail::threads_of(with_a_member{}) == 0);
  std::vector<std::size_t> ran;
  lamina::sequential{}(4, [&](std::size_t task) { ran.push_back(task); });
  CHECK(ran == std::vector<std::size_t>{0, 1, 2, 3});
}

}  // namespace lamina_test::execution_test
