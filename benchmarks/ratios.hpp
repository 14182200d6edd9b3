// SPDX-License-Identifier: MIT
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

/// What is compared in a program of benchmarks: ratios of medians within one run, whose repetitions are interleaved, since
/// times alone say as much about the machine's neighbours as about the program.
namespace lamina_benchmark {

struct ratio {
  std::string name;
  std::string numerator;  // names of benchmarks
  std::string denominator;
  double limit;
  bool at_least = false;  // the limit is one from below
};

/// Google Benchmark's table, and after it a line `ratio NAME VALUE limit LIMIT ok|over` for each ratio whose benchmarks ran.
class ratio_reporter : public benchmark::ConsoleReporter {
 public:
  explicit ratio_reporter(std::vector<ratio> ratios)
      : ConsoleReporter(OO_Tabular), ratios_(std::move(ratios)) {}

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type == Run::RT_Iteration && !run.error_occurred) {
        times_[name_of(run)].push_back(run.GetAdjustedRealTime());
      }
    }
    // Of several repetitions the aggregates, which come in a call of their own, say enough.
    if (runs.front().run_type == Run::RT_Aggregate || runs.front().repetitions == 1)
      ConsoleReporter::ReportRuns(runs);
  }

  void Finalize() override {
    for (const ratio& each : ratios_) {
      if (!times_.contains(each.numerator) || !times_.contains(each.denominator)) continue;
      const double value = median(times_[each.numerator]) / median(times_[each.denominator]);
      const bool ok = each.at_least ? value >= each.limit : value <= each.limit;
      std::printf("ratio %-44s %6.3f limit %s%.2f %s\n", each.name.c_str(), value, each.at_least ? ">=" : "",
                  each.limit, ok ? "ok" : "over");
    }
  }

 private:
  static std::string name_of(const Run& run) {
    return run.run_name.args.empty() ? run.run_name.function_name
                                     : run.run_name.function_name + "/" + run.run_name.args;
  }

  static double median(std::vector<double> times) {
    std::ranges::sort(times);
    const std::size_t half = times.size() / 2;
    return times.size() % 2 == 1 ? times[half] : (times[half - 1] + times[half]) / 2;
  }

  std::vector<ratio> ratios_;
  std::map<std::string, std::vector<double>> times_;
};

/// The main of a program of benchmarks: nine interleaved repetitions unless the command line says otherwise.
inline int run(int argc, char** argv, std::vector<ratio> ratios) {
  std::vector<char*> arguments(argv, argv + argc);
  std::string repetitions = "--benchmark_repetitions=9";
  std::string interleaved = "--benchmark_enable_random_interleaving=true";
  std::string time = "--benchmark_min_time=0.1";
  for (std::string* flag : {&time, &interleaved, &repetitions})
    arguments.insert(arguments.begin() + 1, flag->data());
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;
  ratio_reporter reporter(std::move(ratios));
  benchmark::RunSpecifiedBenchmarks(&reporter);
  return 0;
}

}  // namespace lamina_benchmark
