// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "lamina/layout.hpp"

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

/// The blocks of all layers of a model, numbered through, and how they are cut into tasks for threads.
class layer_blocks {
 public:
  explicit layer_blocks(const layout& model) : model_(model) {
    first_.push_back(0);
    for (const std::size_t elements : model.sizes()) {
      first_.push_back(first_.back() + elements / block_elements + (elements % block_elements != 0));
    }
  }

  std::size_t count() const noexcept { return first_.back(); }
  /// The blocks of `layer` are [first(layer), first(layer + 1)).
  std::size_t first(std::size_t layer) const noexcept { return first_[layer]; }
  /// Where a block begins in its layer, and its elements.
  std::pair<std::size_t, std::size_t> extent_of(std::size_t layer, std::size_t block) const noexcept {
    const std::size_t begin = (block - first_[layer]) * block_elements;
    return {begin, (std::min)(block_elements, model_.sizes()[layer] - begin)};
  }

  /// Calls work(layer, block, end) for each run of blocks of one layer of [first, last), in tasks that cross layers: one for each thread
  /// where the execution says how many it has, of 131,072 elements otherwise.
  template <class Execution, class Work>
  void for_each_run(std::size_t first, std::size_t last, const Execution& execution, const Work& work) const {
    const auto bounds = std::span(first_).subspan(first, last - first + 1);
    const std::size_t blocks = bounds.back() - bounds.front();
    const std::size_t most = blocks / blocks_per_task + (blocks % blocks_per_task != 0);
    const std::size_t threads = threads_of(execution);
    const std::size_t tasks = threads == 0 ? most : (std::min)(most, threads);
    // The blocks before a task of equal ones; without a product that might overflow.
    const auto before = [&](std::size_t task) {
      return bounds.front() + blocks / tasks * task + (std::min)(task, blocks % tasks);
    };
    const auto run = [&](std::size_t task) {
      std::size_t block = before(task);
      const std::size_t stop = before(task + 1);
      std::size_t layer =
          first +
          static_cast<std::size_t>(std::upper_bound(bounds.begin(), bounds.end(), block) - bounds.begin()) -
          1;
      for (; block < stop; ++layer) {
        const std::size_t end = (std::min)(stop, first_[layer + 1]);
        if (block < end) work(layer, block, end);
        block = end;
      }
    };
    if (tasks == 1) {
      run(0);
    } else if (tasks > 1) {
      execution(tasks, run);
    }
  }

 private:
  static constexpr std::size_t blocks_per_task = 32;  // enough to be worth handing to a thread

  layout model_;
  std::vector<std::size_t> first_;  // L + 1
};

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI
