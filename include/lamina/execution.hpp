// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstddef>

#if defined(_OPENMP)
#include <omp.h>
#endif

/// How independent pieces of work are run: an execution is called with a number of pieces and a function of the piece's
/// index, and returns when all are done. Results do not depend on it, to the last bit.
///
/// Your own thread pool is one line:
///
///     auto pool = [&](std::size_t pieces, auto&& work) { my_pool.parallel_for(0, pieces, work); };
///     compressor.accumulate(l, gradient, pool);
///
/// Intel's TBB likewise: `tbb::parallel_for(std::size_t{0}, pieces, work)`. `work` may run in any order and at the same
/// time, and does not throw.
namespace lamina {

template <class E>
concept execution = std::invocable<const E&, std::size_t, void (*)(std::size_t)>;

/// One piece after the other, in the calling thread; the default.
struct sequential {
  template <class Work>
  void operator()(std::size_t pieces, Work&& work) const {
    for (std::size_t i = 0; i < pieces; ++i) work(i);
  }
};

#if defined(_OPENMP)
/// OpenMP threads, where the compiler has it switched on; 0: as many as OpenMP would start.
struct openmp {
  int threads = 0;
  template <class Work>
  void operator()(std::size_t pieces, Work&& work) const {
    const int count = threads > 0 ? threads : omp_get_max_threads();
#pragma omp parallel for num_threads(count) schedule(static)
    for (std::size_t i = 0; i < pieces; ++i) work(i);
  }
};
#endif

}  // namespace lamina
