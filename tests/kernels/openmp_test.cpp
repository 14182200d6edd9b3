// SPDX-License-Identifier: MIT
#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "catch.hpp"
#include "lamina/execution.hpp"

TEST_CASE("openmp: the tasks run on as many threads as asked for, which it tells") {
  std::vector<int> thread_of(64, -1);
  lamina::openmp{2}(thread_of.size(), [&](std::size_t i) { thread_of[i] = omp_get_thread_num(); });
  CHECK(std::ranges::count(thread_of, 0) == 32);
  CHECK(std::ranges::count(thread_of, 1) == 32);
  CHECK(lamina::openmp{3}.threads() == 3);
  CHECK(lamina::openmp{}.threads() == static_cast<std::size_t>(omp_get_max_threads()));
  CHECK(lamina::detail::threads_of(lamina::openmp{5}) == 5);
}
