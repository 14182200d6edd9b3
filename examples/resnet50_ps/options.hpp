// SPDX-License-Identifier: MIT
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

/// The command line with its defaults. help.txt says what each option does.
struct options {
  std::string data = "synthetic";
  std::int64_t image_size = 0;
  std::size_t batch = 16;
  std::uint64_t steps = 100;
  std::uint64_t seed = 1;
  std::vector<std::string> runs = {"allreduce", "0", "0.95"};
  std::size_t fragment = 65'536;
  std::uint64_t refresh = 1;
  bool local = false;
  bool async = false;
  std::uint64_t staleness = std::numeric_limits<std::uint64_t>::max();
  int workers_per_node = 1;
  int workers = 0;  // as many as there are

  double learning_rate = 0.01;
  std::uint64_t warm_up = 10;
  double momentum = 0;

  std::uint64_t evaluate_every = 0;
  std::string output;
  std::uint64_t checkpoint_every = 0;
  bool resume = false;
  int threads = 0;
  int timeout = 600;
};

/// Adds the options to a parser, which refuses what is out of range.
inline void add_options(CLI::App& app, options& o) {
  const CLI::Range counted(1, 1 << 30);
  const CLI::Range count(0, 1 << 30);
  const auto is_run = [](const std::string& text) {
    double ratio = -1;
    const bool is_good = text == "allreduce" || (CLI::detail::lexical_cast(text, ratio) && ratio >= 0 && ratio <= 1);
    return is_good ? "" : "'" + text + "' is neither a drop ratio from 0 to 1 nor allreduce";
  };
  app.option_defaults()->always_capture_default();
  app.add_option("--data", o.data);
  app.add_option("--image-size", o.image_size)->check(count);
  app.add_option("--batch", o.batch)->check(CLI::Range(2, 1 << 20));
  app.add_option("--steps", o.steps)->check(counted);
  app.add_option("--seed", o.seed)->check(count);
  app.add_option("--runs", o.runs)->delimiter(',')->check(CLI::Validator(is_run, ""));
  app.add_option("--fragment", o.fragment)->check(count);
  app.add_option("--refresh", o.refresh)->check(counted);
  app.add_flag("--local", o.local);
  auto* async = app.add_flag("--async", o.async);
  app.add_option("--staleness", o.staleness)->check(count)->needs(async);
  app.add_option("--workers", o.workers)->check(counted);
  app.add_option("--workers-per-node", o.workers_per_node)->check(count);
  app.add_option("--learning-rate", o.learning_rate)->check(CLI::Range(0.0, 1000.0));
  app.add_option("--warm-up", o.warm_up)->check(count);
  app.add_option("--momentum", o.momentum)->check(CLI::Range(0.0, 0.9999));
  app.add_option("--evaluate-every", o.evaluate_every)->check(count);
  auto* output = app.add_option("--output", o.output);
  app.add_option("--checkpoint-every", o.checkpoint_every)->check(count)->needs(output)->excludes(async);
  app.add_flag("--resume", o.resume)->needs(output)->excludes(async);
  app.add_option("--threads", o.threads)->check(count);
  app.add_option("--timeout", o.timeout)->check(counted);
}
