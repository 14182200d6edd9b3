// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstddef>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "lamina/detail/abi.hpp"

/// How independent tasks are run: an execution is called with a number of tasks and a function of the task's index, and returns when all
/// are done, in any order and any threads. Results are bitwise the same with every execution. The function does not throw; an execution
/// that throws has no task running any more. Your own thread pool is one line, and Intel's TBB likewise:
///
///     auto pool = [&](std::size_t tasks, auto&& work) { my_pool.parallel_for(0, tasks, work); };
///     step.add(l, gradient, 1, pool);
///
/// One that says how many threads it has gets as many tasks, of equal size; another gets tasks of up to 131,072 elements.
///
///     struct pool_execution {
///       my_pool& pool;
///       std::size_t threads() const { return pool.size(); }
///       void operator()(std::size_t tasks, auto&& work) const { pool.parallel_for(0, tasks, work); }
///     };
namespace lamina::inline LAMINA_ABI {

template <class E>
concept execution = std::invocable<const E&, std::size_t, void (*)(std::size_t)>;

/// One task after the other, in the calling thread; the default.
struct sequential {
  [[nodiscard]] static constexpr std::size_t threads() noexcept { return 1; }
  template <class Work>
  void operator()(std::size_t tasks, Work&& work) const {
    for (std::size_t i = 0; i < tasks; ++i) work(i);
  }
};

#if defined(_OPENMP)
/// OpenMP threads, where the compiler has it switched on: `count` of them; 0: as many as OpenMP would start.
struct openmp {
  int count = 0;
  [[nodiscard]] std::size_t threads() const noexcept {
    return static_cast<std::size_t>(count > 0 ? count : omp_get_max_threads());
  }
  template <class Work>
  void operator()(std::size_t tasks, Work&& work) const {
    const int started = static_cast<int>(threads());
#pragma omp parallel for num_threads(started) schedule(static)
    for (std::size_t i = 0; i < tasks; ++i) work(i);
  }
};
#endif

namespace detail {

// How many threads an execution says it has; 0: it does not say.
template <class Execution>
std::size_t threads_of([[maybe_unused]] const Execution& execution) {
  if constexpr (requires {
                  { execution.threads() } -> std::convertible_to<std::size_t>;
                }) {
    return execution.threads();
  } else {
    return 0;
  }
}

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI
