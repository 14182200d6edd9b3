// SPDX-License-Identifier: MIT
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdlib>

namespace lamina_benchmark {

/// Whether only what takes seconds is wanted: ./benchmarks/run --quick sets LAMINA_BENCHMARK_QUICK.
inline bool is_quick() {
  return std::getenv("LAMINA_BENCHMARK_QUICK") != nullptr;
}

/// Whether the machine has twice as much memory as is wanted, in GB: what is larger is left out.
inline bool has_memory_for(double gigabytes) {
  const auto bytes =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  return bytes >= 2e9 * gigabytes;
}

}  // namespace lamina_benchmark
