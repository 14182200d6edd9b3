// SPDX-License-Identifier: MIT
#include "lamina/execution.hpp"

#include <cstddef>
#include <vector>

#include "catch.hpp"

namespace {

struct pool {
  std::size_t size;
  [[nodiscard]] std::size_t threads() const { return size; }
  template <class Work>
  void operator()(std::size_t pieces, Work&& work) const {
    for (std::size_t i = pieces; i > 0; --i) work(i - 1);
  }
};

}  // namespace

TEST_CASE("execution: a pool, a lambda and the default are executions") {
  const auto lambda = [](std::size_t pieces, auto&& work) {
    for (std::size_t i = 0; i < pieces; ++i) work(i);
  };
  STATIC_REQUIRE(lamina::execution<pool>);
  STATIC_REQUIRE(lamina::execution<decltype(lambda)>);
  STATIC_REQUIRE(lamina::execution<lamina::sequential>);
  STATIC_REQUIRE_FALSE(lamina::execution<int>);
}

TEST_CASE("execution: one that says how many threads it has is heard, another is unknown") {
  CHECK(lamina::detail::threads_of(pool{7}) == 7);
  CHECK(lamina::detail::threads_of(lamina::sequential{}) == 1);
  CHECK(lamina::detail::threads_of([](std::size_t, auto&&) {}) == 0);
  struct with_a_member {
    int threads = 4;  // a number and no function: not what is meant
  };
  CHECK(lamina::detail::threads_of(with_a_member{}) == 0);
}

TEST_CASE("execution: the default runs each piece once, in order") {
  std::vector<std::size_t> ran;
  lamina::sequential{}(4, [&](std::size_t piece) { ran.push_back(piece); });
  CHECK(ran == std::vector<std::size_t>{0, 1, 2, 3});
}
