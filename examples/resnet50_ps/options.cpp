// SPDX-License-Identifier: MIT
#include "options.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <sstream>

namespace resnet50_ps {
namespace {

// Ranges let NaN through, since it compares with nothing.
const CLI::Validator finite(
    [](const std::string& text) {
      double value = 0;
      const bool number = CLI::detail::lexical_cast(text, value);
      return number && !std::isfinite(value) ? text + " is not a finite number" : std::string();
    },
    "");

// Before CLI11 converts it: a minus would wrap around.
const CLI::Validator counted(
    [](const std::string& text) {
      const bool digits =
          !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
      return digits ? std::string() : text + " is not a whole number from 0 up";
    },
    "");
const CLI::Validator at_least_one(
    [](const std::string& text) {
      return text.find_first_of("123456789") == std::string::npos ? text + " is less than 1" : std::string();
    },
    "");

}  // namespace

parsed parse_options(int argc, char** argv) {
  parsed result;
  options& given = result.options;
  CLI::App app(
      "Trains ResNet-50 v1 with a synchronous parameter server over MPI, without and with layer dropping, on "
      "the same "
      "data from the same start. Rank 0 is the server, every other rank a worker.");
  app.get_formatter()->column_width(34);
  app.option_defaults()->always_capture_default();

  app.add_option("--data", given.data, "cifar10:DIR, imagefolder:DIR or synthetic");
  app.add_option("--image-size", given.image_size_pixels,
                 "pixels a side; 0: the data set's own (32, 224, 32)")
      ->check(CLI::Range(0, 4096));
  app.add_flag("--small-stem", given.small_stem,
               "3x3 first convolution without pooling, for small images; slower");
  app.add_option("--steps", given.steps, "steps of each run")->check(counted)->check(at_least_one);
  app.add_option("--batch", given.batch_images, "images a worker in each step")
      ->check(CLI::Range(2, 1 << 20));
  app.add_option("--drop-ratio", given.drop_ratio,
                 "R: share of the elements to hold back; 0 sends everything")
      ->check(finite)
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--refresh", given.refresh_steps,
                 "steps between searches for the threshold; the paper has 100; 0: the first step alone")
      ->check(counted);
  app.add_option("--threshold", given.threshold,
                 "a threshold of your own, never searched; in place of --drop-ratio")
      ->check(finite)
      ->excludes("--refresh");
  app.add_option("--learning-rate", given.learning_rate,
                 "of SGD at the server; 0: 0.03 for synthetic, 0.01 for photographs")
      ->check(finite)
      ->check(CLI::NonNegativeNumber);
  app.add_option("--momentum", given.momentum, "of SGD at the server; layers that nobody sent are frozen")
      ->check(finite)
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--seed", given.seed, "of the parameters, the data and their order")->check(counted);
  app.add_option("--runs", given.runs, "layer dropping: both, with or without")
      ->check(CLI::IsMember({"both", "with", "without"}));
  app.add_option("--interval", given.interval, "steps between printed lines")
      ->check(counted)
      ->check(at_least_one);
  app.add_option("--log", given.log, "write every step to this file, as lines of JSON");
  app.add_option("--workers", given.workers,
                 "how many workers to start (./run reads it; default 2); mpirun starts one more rank");
  app.add_option("--threads", given.threads,
                 "threads a worker; 0: the machine's cores shared among its workers")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--timeout", given.timeout_seconds,
                 "seconds to wait for a peer's step or evaluation before giving up")
      ->check(counted)
      ->check(at_least_one);

  try {
    app.parse(argc, argv);
    if (given.learning_rate == 0) given.learning_rate = given.data == "synthetic" ? 0.03F : 0.01F;
  } catch (const CLI::ParseError& error) {
    std::ostringstream text;
    const int code = app.exit(error, text, text);
    result.exit_code = code == 0 ? 0 : 2;  // the usual status for a command line that is wrong
    result.message = text.str();
  }
  return result;
}

}  // namespace resnet50_ps
