// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace resnet50_ps {

/// What to run: the command line, with its defaults.
struct options {
  std::string data = "synthetic";
  std::int64_t image_size_pixels = 0;
  bool small_stem = false;
  std::uint64_t steps = 150;
  std::size_t batch_images = 32;
  double drop_ratio = 0.95;
  std::uint64_t refresh_steps = 1;  ///< 0: in the first step alone
  std::optional<double> threshold;
  float learning_rate = 0;  ///< 0: what suits the data set
  float momentum = 0.0F;
  std::uint64_t seed = 1;
  std::string runs = "both";  ///< both, without or with layer dropping
  std::uint64_t interval = 15;
  std::string log;
  std::optional<std::size_t> workers;
  int threads = 0;  ///< a worker; 0: the machine's cores shared among its workers
  std::uint64_t timeout_seconds = 600;
};

struct parsed {
  resnet50_ps::options options;
  /// Set if the program has nothing to run: what to print, and how to end.
  std::optional<int> exit_code;
  std::string message;
};

/// Reads the command line; for --help and for a mistake gives the message and the exit code.
parsed parse_options(int argc, char** argv);

}  // namespace resnet50_ps
