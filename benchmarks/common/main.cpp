// SPDX-License-Identifier: MIT
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

/// The main of every program of benchmarks. Repetitions are interleaved, since times alone say as much about the machine's
/// neighbours as about the program: what is compared are ratios of medians within one run.
int main(int argc, char** argv) {
  std::vector<std::string> defaults = {"--benchmark_repetitions=9", "--benchmark_min_time=0.1",
                                       "--benchmark_enable_random_interleaving=true",
                                       "--benchmark_counters_tabular=true"};
  std::vector<char*> arguments = {argv[0]};
  for (std::string& each : defaults) arguments.push_back(each.data());
  arguments.insert(arguments.end(), argv + 1, argv + argc);  // the last of two that contradict counts
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;
  benchmark::AddCustomContext("compiler", LAMINA_BENCHMARK_COMPILER);
  benchmark::AddCustomContext("flags", LAMINA_BENCHMARK_FLAGS);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
