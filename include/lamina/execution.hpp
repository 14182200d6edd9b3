// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstddef>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "lamina/detail/abi.hpp"

/// How independent pieces of work are run: an execution is called with a number of pieces and a function of the piece's
/// index, and returns when all are done. Results do not depend on it, to the last bit.
///
/// Your own thread pool is one line:
///
///     auto pool = [&](std::size_t pieces, auto&& work) { my_pool.parallel_for(0, pieces, work); };
///     step.add(l, gradient, 1, pool);
///
/// Intel's TBB likewise: `tbb::parallel_for(std::size_t{0}, pieces, work)`. `work` may run in any order and at the same
/// time, and does not throw. An execution that throws has no piece running any more.
///
/// An execution may say how many threads it has: work is then cut into that many pieces of equal size, so that none of them
/// waits for the last piece of another. Of one that does not say, a lambda for instance, work comes in pieces of up to
/// 131,072 elements, more of them than there mostly are threads.
///
///     struct pool_execution {
///       my_pool& pool;
///       std::size_t threads() const { return pool.size(); }
///       void operator()(std::size_t pieces, auto&& work) const { pool.parallel_for(0, pieces, work); }
///     };
namespace lamina::inline LAMINA_ABI {

template <class E>
concept execution = std::invocable<const E&, std::size_t, void (*)(std::size_t)>;

/// One piece after the other, in the calling thread; the default.
struct sequential {
  [[nodiscard]] static constexpr std::size_t threads() noexcept { return 1; }
  template <class Work>
  void operator()(std::size_t pieces, Work&& work) const {
    for (std::size_t i = 0; i < pieces; ++i) work(i);
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
  void operator()(std::size_t pieces, Work&& work) const {
    const int started = static_cast<int>(threads());
#pragma omp parallel for num_threads(started) schedule(static)
    for (std::size_t i = 0; i < pieces; ++i) work(i);
  }
};
#endif

namespace detail {

/// How many threads an execution says it has; 0: it does not say.
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
