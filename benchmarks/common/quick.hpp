// SPDX-License-Identifier: MIT
#pragma once

#include <cstdlib>

namespace lamina_benchmark {

/// Whether only what takes seconds is wanted: ./benchmarks/run --quick sets LAMINA_BENCHMARK_QUICK.
inline bool is_quick() {
  return std::getenv("LAMINA_BENCHMARK_QUICK") != nullptr;
}

}  // namespace lamina_benchmark
