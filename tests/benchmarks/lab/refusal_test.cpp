// SPDX-License-Identifier: MIT
// What the program refuses before any time is spent, and in which words: by the functions that main calls, in one process.
// What takes several ranks to be seen is in CMakeLists.txt.
#include "data/data.hpp"  // Torch defines CHECK, so its headers come before Catch2's.
#include "launch/training.hpp"
#include "state/saved_run.hpp"

#include <torch/cuda.h>

#include "catch.hpp"

#include <fstream>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "temporary_directory.hpp"

namespace {

using namespace lab;

/// What is said of this command line, by the first that has something to say; empty if nobody has.
std::string refusal_of(std::vector<std::string> arguments, std::size_t workers = 2) {
  arguments.insert(arguments.begin(), "lab");
  std::vector<char*> argv;
  for (std::string& each : arguments) argv.push_back(each.data());
  const parsed command = parse_options(static_cast<int>(argv.size()), argv.data());
  if (command.exit_code) {
    CHECK(*command.exit_code == 2);
    return command.message;
  }
  const options& given = command.options;
  try {
    const data_sets data = open_data(given.data, {given.image_size_pixels, given.seed});
    check_training({.options = given, .data = data, .topology = flat_topology(workers)}, true);
  } catch (const std::invalid_argument& error) {
    return error.what();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

struct refusal {
  std::vector<std::string> arguments;
  std::string said;
};

void require_refused(std::initializer_list<refusal> refusals) {
  for (const refusal& each : refusals) {
    INFO("the last of: " + each.arguments.back());
    CHECK_THAT(refusal_of(each.arguments), Catch::Matchers::Contains(each.said));
  }
}

}  // namespace

TEST_CASE("refusals: a command line as it should be is taken") {
  CHECK(refusal_of({}) == "");
  CHECK(refusal_of({"--drop-ratio", "1", "--steps", "1", "--classes", "10"}) == "");
  CHECK(refusal_of({"--topology", "mpi_allreduce"}) == "");
  CHECK(refusal_of({"--transport", "inprocess"}) == "");
  CHECK(refusal_of({"--output", "o", "--checkpoint-every", "2"}) == "");
  CHECK(refusal_of({"--transport", "inprocess", "--loss-bound", "0.1", "--loss-bound-down", "0.1",
                    "--loss-bound-warm-up", "5", "--inject-loss", "0.7", "--stop", "on-probe"}) == "");
  CHECK(refusal_of({"--transport", "inprocess", "--loss-bound", "0.1", "--topology", "hybrid"}) == "");
  CHECK(refusal_of({"--transport", "inprocess", "--loss-bound", "0.1", "--topology", "allreduce", "--payload",
                    "int8", "--max-age", "5"}) == "");
  CHECK(refusal_of({"--transport", "udp", "--loss-bound", "0.1", "--topology", "allreduce", "--updates",
                    "local"}) == "");
  CHECK(refusal_of({"--transport", "udp", "--loss-bound", "0.1", "--loss-bound-down", "0.1", "--inject-loss",
                    "0.2", "--link-rate", "1000000000", "--mtu", "1400", "--interface", "127.0.0.1",
                    "--degraded", "--runs", "with"}) == "");
}

TEST_CASE("refusals: options that do not exist, or are out of range, are named") {
  require_refused({
      {{"--no-such-option"}, "--no-such-option"},
      {{"--drop-ratio", "1.5"}, "--drop-ratio: Value 1.5 not in range"},
      {{"--drop-ratio", "nan"}, "--drop-ratio: nan is not a finite number"},
      {{"--steps", "0"}, "--steps: 0 is less than 1"},
      {{"--seed", "-1"}, "--seed: -1 is not a whole number"},
      {{"--learning-rate", "-1"}, "--learning-rate: "},
      {{"--topology", "hybrid", "--workers-per-node", "0"}, "--workers-per-node: 0 is less than 1"},
      {{"--schedule", "sometimes"}, "schedule 'sometimes' is none of constant, cosine"},
      {{"--nesterov"}, "esterov"},
      {{"--part-elements", "1000"}, "part_elements must be a multiple of 4096, got 1000"},
      {{"--residual-momentum", "1"}, "--residual-momentum: Value 1 not in range"},
      {{"--drop-warm-up", "-1"}, "--drop-warm-up: -1 is not a whole number"},
      {{"--loss-bound", "0.6"}, "--loss-bound: Value 0.6 not in range"},
      {{"--loss-bound-down", "nan"}, "--loss-bound-down: nan is not a finite number"},
      {{"--loss-bound-warm-up", "-1"}, "--loss-bound-warm-up: -1 is not a whole number"},
      {{"--stop", "late"}, "--stop: late not in"},
      {{"--on-loss", "ignore"}, "--on-loss: ignore not in"},
      {{"--max-losses", "256"}, "--max-losses: Value 256 not in range"},
      {{"--inject-loss", "0.71"}, "--inject-loss: Value 0.71 not in range"},
      {{"--mtu", "575"}, "--mtu: Value 575 not in range"},
      {{"--link-rate", "fast"}, "--link-rate: fast is not a whole number"},
      {{"--transport", "tcp"}, "--transport: tcp not in"},
      {{"--inject-seed", "4294967296"}, "--inject-seed: Value 4294967296 not in range"},
  });
}

TEST_CASE("refusals: options that exclude or need each other are named, both") {
  require_refused({
      {{"--threshold", "0.1", "--refresh", "10"}, "--refresh excludes --threshold"},
      {{"--budget", "0.1", "--threshold", "0.1"}, "excludes --"},
      {{"--topology", "allreduce", "--selection", "local"}, "--topology allreduce needs --selection agreed"},
      {{"--topology", "allreduce", "--selection", "agreed", "--mode", "async"},
       "--mode async needs a server"},
      {{"--topology", "mpi_allreduce", "--runs", "both"}, "it needs --runs without"},
      {{"--topology", "mpi_allreduce", "--mode", "async"}, "--mode async needs a server"},
      {{"--topology", "mpi_allreduce", "--transport", "inprocess"}, "needs --transport mpi"},
      {{"--topology", "mpi_allreduce", "--output", "o", "--checkpoint-every", "2"}, "makes no checkpoints"},
      {{"--save", "model.pt"}, "--save needs --runs with or without"},
      {{"--runs", "all", "--transport", "inprocess"}, "--runs all needs --transport mpi"},
      {{"--runs", "all", "--output", "o", "--checkpoint-every", "2"}, "--runs all makes no checkpoints"},
      {{"--topology", "ps", "--workers-per-node", "2"}, "--workers-per-node needs --topology hybrid"},
      {{"--degraded", "--mode", "async", "--runs", "with"},
       "--degraded needs a server that waits for every worker"},
      {{"--degraded"}, "--degraded needs --runs with or without"},
      {{"--degraded", "--runs", "with", "--topology", "hybrid"}, "--mode sync and --topology ps"},
      {{"--merge-residuals"}, "--merge-residuals requires --resume"},
      {{"--selection", "agreed", "--mode", "async"}, "--selection agreed needs workers in step"},
      {{"--staleness", "2"}, "--staleness needs --mode async"},
      {{"--mode", "async", "--staleness", "-1"}, "--staleness: -1 is not a whole number"},
      {{"--loss-bound", "0.1"}, "--loss-bound needs --transport inprocess or udp"},
      {{"--loss-bound-down", "0.1"}, "--loss-bound-down needs --transport inprocess"},
      {{"--inject-loss", "0.1"}, "--inject-loss needs --transport inprocess"},
      {{"--loss-bound-down", "0.1", "--transport", "inprocess", "--topology", "allreduce"},
       "--loss-bound-down needs a server: a sum that only some have would part the replicas of --topology "
       "allreduce"},
      {{"--loss-bound", "0.1", "--transport", "inprocess", "--topology", "allreduce", "--overlap", "backward",
        "--runs", "without"},
       "--overlap backward: not --loss-bound or --inject-loss"},
      {{"--loss-bound", "0.1", "--topology", "mpi_allreduce"},
       "--loss-bound needs --transport inprocess or udp"},
      {{"--loss-bound", "0.1", "--transport", "inprocess", "--degraded", "--runs", "with"},
       "--loss-bound needs workers that all stay in one process: not --degraded"},
      {{"--transport", "udp", "--topology", "mpi_allreduce"},
       "--topology mpi_allreduce needs --transport mpi"},
      {{"--transport", "udp", "--runs", "all"}, "--runs all needs --transport mpi"},
      {{"--transport", "udp", "--loss-bound-down", "0.1", "--topology", "hybrid"},
       "--loss-bound-down needs workers that hear the server themselves"},
      {{"--interface", "10.0.0.0/8"}, "--interface needs --transport udp"},
      {{"--link-rate", "1000000", "--transport", "inprocess"}, "--link-rate needs --transport udp"},
      {{"--mtu", "1400"}, "--mtu needs --transport udp"},
      {{"--loss-bound-down", "0.1", "--transport", "inprocess", "--topology", "hybrid"},
       "--loss-bound-down needs workers that hear the server themselves: not --topology hybrid"},
      {{"--loss-bound-warm-up", "5"}, "--loss-bound-warm-up needs a bound"},
      {{"--stop", "on-probe", "--transport", "inprocess", "--inject-loss", "0.1"}, "--stop needs a bound"},
      {{"--loss-tags", "off"}, "--loss-tags needs a bound"},
      {{"--on-loss", "zero"}, "--on-loss needs --loss-bound"},
      {{"--max-losses", "1"}, "--max-losses needs --loss-bound, and --on-loss return"},
      {{"--transport", "inprocess", "--loss-bound", "0.1", "--on-loss", "zero", "--max-losses", "1"},
       "--max-losses needs --loss-bound, and --on-loss return"},
  });
}

TEST_CASE("refusals: sums beside the computation exclude what cannot be with them, and both are named") {
  // A run without layer dropping, and one with it.
  const std::vector<std::string> dense = {"--topology", "allreduce", "--selection",
                                          "agreed",     "--runs",    "without"};
  const auto with = [](std::vector<std::string> options, std::initializer_list<const char*> more) {
    options.insert(options.end(), more.begin(), more.end());
    return options;
  };
  const auto backward = with(dense, {"--overlap", "backward"});
  const std::vector<std::string> dropping = {"--topology", "allreduce", "--selection",
                                             "agreed",     "--runs",    "with"};
  CHECK(refusal_of(backward) == "");
  CHECK(refusal_of(with(backward, {"--transport", "inprocess"})) == "");
  CHECK(refusal_of(with(dense, {"--overlap", "step", "--exchange", "owners", "--bucket-bytes", "0"})) == "");
  CHECK(refusal_of(with(backward, {"--sum-payload", "bfloat16"})) == "");
  CHECK(refusal_of(with(dropping, {"--overlap", "step", "--decide", "ahead"})) == "");
  CHECK(refusal_of(with(dropping, {"--decide", "ahead"})) == "");
  CHECK(refusal_of({"--topology", "allreduce", "--selection", "agreed", "--overlap", "backward", "--decide",
                    "ahead"}) == "");
  CHECK(refusal_of(with(backward, {"--collectives", "by_type"})) == "");
  const std::vector<std::string> as_ready = {"--decide", "as_ready", "--selection", "local"};
  CHECK(refusal_of(as_ready) == "");
  CHECK(refusal_of(with(as_ready, {"--overlap", "backward", "--bucket-bytes", "0"})) == "");
  CHECK(refusal_of(with(as_ready, {"--overlap", "step", "--transport", "inprocess", "--runs", "without"})) ==
        "");
  CHECK(refusal_of(with(as_ready, {"--overlap", "step", "--checkpoint-every", "2", "--output", "o"})) == "");
  require_refused({
      {with(as_ready, {"--topology", "hybrid", "--workers-per-node", "2"}),
       "--decide as_ready needs --topology ps, not --topology hybrid"},
      {with(dense, {"--decide", "as_ready"}),
       "--decide as_ready needs --topology ps, not --topology allreduce"},
      {with(as_ready, {"--mode", "async"}), "--decide as_ready needs --mode sync"},
      {{"--decide", "as_ready"}, "--decide as_ready needs --selection local, not --selection agreed"},
      {with(as_ready, {"--degraded"}), "--decide as_ready: not --degraded"},
      {with(as_ready, {"--device", "cuda"}), "--decide as_ready needs --device cpu"},
      {with(as_ready, {"--transport", "udp"}),
       "--decide as_ready needs --transport mpi or inprocess, not --transport udp"},
      {with(as_ready, {"--updates", "local"}), "--updates local needs --decide at_end"},
      {with(as_ready, {"--overlap", "step", "--chunk-bytes", "8192"}),
       "--chunk-bytes 8192 needs --topology allreduce"},
      {with(as_ready, {"--overlap", "step", "--exchange", "owners"}),
       "--exchange owners needs --topology allreduce"},
      {with(as_ready, {"--overlap", "step", "--timeline", "t.json"}),
       "--timeline needs --topology allreduce"},
      {with(as_ready, {"--bucket-bytes", "0"}),
       "--bucket-bytes 0 needs --overlap backward or --overlap step"},
  });
  require_refused({
      {with(backward, {"--mode", "async"}), "--overlap backward needs --mode sync"},
      {{"--overlap", "backward", "--topology", "hybrid"},
       "--overlap backward needs --topology allreduce or ps, not --topology hybrid"},
      {{"--overlap", "step"},
       "--overlap step needs --decide as_ready with --topology ps, not --decide at_end"},
      {with(backward, {"--degraded"}), "--overlap backward: not --degraded"},
      {with(backward, {"--device", "cuda"}),
       "--overlap backward needs --device cpu: gradients come to the CPU's memory after backward alone"},
      {with(backward, {"--transport", "inprocess", "--calibrate"}), "--calibrate needs --transport mpi"},
      {with(dropping, {"--overlap", "backward"}),
       "--overlap backward sends nothing before backward ends when --decide at_end: use --decide ahead"},
      {{"--topology", "allreduce", "--selection", "local", "--decide", "ahead"},
       "--decide ahead needs --selection agreed, not --selection local"},
      {{"--selection", "agreed", "--decide", "ahead"},
       "--decide ahead needs --topology allreduce, not --topology ps"},
      {{"--exchange", "owners"}, "--exchange owners needs --overlap backward or --overlap step"},
      {with(dense, {"--collectives", "ring"}),
       "--collectives ring needs --overlap backward or --overlap step"},
      {with(dense, {"--bucket-bytes", "0"}), "--bucket-bytes 0 needs --overlap backward or --overlap step"},
      {with(dense, {"--sum-payload", "bfloat16"}),
       "--sum-payload bfloat16 needs --overlap backward or --overlap step"},
      {with(backward, {"--sum-payload", "float16"}), "--sum-payload"},
      {with(backward, {"--sum-payload", "bfloat16", "--collectives", "ring"}),
       "--sum-payload bfloat16 needs --collectives pairwise, not --collectives ring"},
      {with(dense, {"--timeline", "t.json"}), "--timeline needs --overlap backward or --overlap step"},
      {with(backward, {"--bucket-bytes", "many"}), "--bucket-bytes: many is not a whole number"},
      {with(backward, {"--chunk-bytes", "4095"}), "--chunk-bytes 4095 is less than 4096"},
      {with(backward, {"--collectives", "quick"}), "halving_doubling"},
      {with(backward, {"--exchange", "owners", "--collectives", "by_cost"}),
       "--exchange owners needs --collectives pairwise, ring or halving_doubling, not --collectives by_cost"},
      {with(dense, {"--progress-by", "hooks"}),
       "--progress-by hooks needs --overlap backward or --overlap step"},
      {with(backward, {"--progress-by", "hope"}), "--progress-by: hope not in"},
      {with(dense, {"--plan", "plan.txt"}), "--plan needs --overlap backward or --overlap step"},
      {with(backward, {"--plan", "plan.txt", "--bucket-bytes", "0"}), "--plan has what --bucket-bytes says"},
      {with(backward, {"--plan", "plan.txt", "--chunk-bytes", "8192"}), "--plan has what --chunk-bytes says"},
      {with(backward, {"--plan", "plan.txt", "--calibrate"}), "--plan has what --calibrate says"},
      {with(backward, {"--plan", "plan.txt", "--collectives", "ring"}), "--plan has what --collectives says"},
      {with(backward, {"--plan", "plan.txt", "--output", "o", "--resume"}),
       "--plan begins a run, --resume goes on by the plan of its checkpoint"},
      {with(backward, {"--payload", "int8"}),
       "--overlap backward adds numbers up on the way: it needs --payload as_is"},
  });
  CHECK(refusal_of(with(backward, {"--exchange", "owners", "--progress-by", "hooks", "--calibrate",
                                   "--output", "o", "--checkpoint-every", "2"})) == "");
  CHECK(refusal_of(with(backward, {"--plan", "plan.txt"})) == "");
  CHECK(refusal_of(
            with(backward, {"--plan", "plan.txt", "--output", "o", "--resume", "--change-exchange"})) == "");
  const auto halves = with(backward, {"--exchange", "owners", "--collectives", "halving_doubling"});
  CHECK(refusal_of(halves, 4) == "");
  CHECK_THAT(refusal_of(halves, 3), Catch::Matchers::Contains("needs a power of two of workers, not 3"));
}

TEST_CASE("refusals: networks say what they cannot be with") {
  CHECK(refusal_of({"--network", "vgg16", "--image-size", "32"}) == "");
  require_refused({
      {{"--network", "vgg19"}, "--network: vgg19 not in"},
      {{"--network", "vgg16", "--small-stem"}, "--small-stem needs --network resnet50, not --network vgg16"},
      {{"--network", "vgg16", "--image-size", "31"},
       "--network vgg16 needs images of at least 32 pixels a side, not 31"},
  });
}

TEST_CASE("refusals: an exchange is changed by --resume alone, and for workers that keep their residuals") {
  const auto changing = [](std::initializer_list<const char*> more) {
    std::vector<std::string> options = {"--output", "o", "--resume", "--change-exchange"};
    options.insert(options.end(), more.begin(), more.end());
    return options;
  };
  CHECK(refusal_of(changing({})) == "");
  require_refused({
      {{"--change-exchange"}, "--change-exchange requires --resume"},
      {changing({"--topology", "hybrid"}), "--change-exchange needs workers that keep their own residuals"},
      {changing({"--merge-residuals"}), "--change-exchange needs the same workers: not --merge-residuals"},
      {changing({"--updates", "local"}), "--change-exchange needs --updates gradients, not --updates local"},
  });
}

// What ranks compare before they begin, and what a checkpoint must have been made with.
TEST_CASE("refusals: ranks and checkpoints are told apart by whatever changes a run") {
  const auto described = [](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"lab",    "--topology", "allreduce", "--selection",
                                          "agreed", "--runs",     "without"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& each : arguments) argv.push_back(each.data());
    const parsed command = parse_options(static_cast<int>(argv.size()), argv.data());
    INFO(command.message);
    REQUIRE(!command.exit_code);
    const training run{.options = command.options, .data = {}, .topology = allreduce_topology(2)};
    return std::pair(configuration_of(run, lamina::layout({{"any", {1}}})), exchange_of(run));
  };
  const auto usual = described({});
  for (const std::vector<std::string>& each : std::vector<std::vector<std::string>>{{"--network", "vgg16"},
                                                                                    {"--batch", "3"},
                                                                                    {"--seed", "2"},
                                                                                    {"--decide", "ahead"},
                                                                                    {"--momentum", "0.5"}}) {
    INFO(each.front());
    CHECK(described(each).first != usual.first);
    CHECK(described(each).second == usual.second);
  }
  const auto overlap = described({"--overlap", "step"});
  CHECK(overlap.first == usual.first);
  CHECK(overlap.second != usual.second);
  CHECK(described({"--overlap", "step", "--progress-by", "hooks"}) == overlap);  // the same bits
  for (const std::vector<std::string>& each :
       std::vector<std::vector<std::string>>{{"--bucket-bytes", "0"},
                                             {"--chunk-bytes", "8192"},
                                             {"--collectives", "ring"},
                                             {"--collectives", "by_type"},
                                             {"--exchange", "owners"},
                                             {"--calibrate"}}) {
    INFO(each.back());
    std::vector<std::string> more = {"--overlap", "step"};
    more.insert(more.end(), each.begin(), each.end());
    CHECK(described(more).first == usual.first);
    CHECK(described(more).second != overlap.second);
  }
}

TEST_CASE("refusals: a link that is too slow for packets is named") {
  require_refused(
      {{{"--transport", "udp", "--link-rate", "1"}, "--link-rate: 1 is neither 0 nor at least 1000000"},
       {{"--transport", "udp", "--link-rate", "000999999"}, "is neither 0 nor at least 1000000"},
       {{"--transport", "udp", "--link-rate", "-1"}, "-1 is not a whole number"}});
}

TEST_CASE("refusals: local updates name what they cannot be with") {
  const std::string local = "--updates local";
  CHECK(refusal_of({"--updates", "local", "--delay", "64", "--down-payload", "int4", "--outer-momentum",
                    "0.9"}) == "");
  CHECK(refusal_of({"--updates", "local", "--topology", "allreduce", "--drop-ratio", "1", "--outer-momentum",
                    "0.9", "--payload", "int8", "--down-payload", "int4"}) == "");
  require_refused({
      {{"--updates", "all"}, "--updates: all not in {gradients,local}"},
      {{"--delay", "1"}, "--delay needs --updates local"},
      {{"--outer-rate", "0.5"}, "--outer-rate needs --updates local"},
      {{"--outer-momentum", "0.5"}, "--outer-momentum needs --updates local"},
      {{"--down-payload", "int8"}, "--down-payload needs --updates local"},
      {{"--updates", "local", "--topology", "hybrid"}, local + " needs --topology ps or allreduce"},
      {{"--updates", "local", "--mode", "async"}, local + " needs --mode sync"},
      {{"--updates", "local", "--degraded", "--runs", "with"}, "not --degraded"},
      {{"--updates", "local", "--residual-momentum", "0.9"}, "use --momentum"},
      {{"--updates", "local", "--topology", "allreduce", "--decide", "ahead"},
       local + " needs --decide at_end"},
      {{"--updates", "local", "--topology", "allreduce", "--overlap", "step", "--decide", "at_end"},
       local + " needs --overlap none"},
      {{"--updates", "local", "--transport", "inprocess", "--loss-bound-down", "0.1"},
       local + " needs all to apply the same: not --loss-bound-down"},
      {{"--updates", "local", "--output", "o", "--resume", "--merge-residuals"}, "not --merge-residuals"},
      {{"--updates", "local", "--delay", "65"}, "--delay"},
      {{"--updates", "local", "--delay", "-1"}, "-1 is not a whole number"},
      {{"--updates", "local", "--outer-rate", "0"}, "the outer rate must be a finite number above 0"},
      {{"--updates", "local", "--outer-rate", "nan"}, "nan is not a finite number"},
      {{"--updates", "local", "--outer-momentum", "1"}, "the outer momentum must lie in [0, 1)"},
      {{"--updates", "local", "--payload", "int5"}, "--payload"},
  });
}

TEST_CASE("refusals: data that is missing, damaged or too little is named") {
  const temporary_directory directory;
  const std::string nowhere = (directory.path() / "nowhere").string();
  std::ofstream(directory.path() / "data_batch_1.bin") << "0123456789";
  std::ofstream(directory.path() / "test_batch.bin") << "0123456789";
  const std::string truncated = directory.path().string();
  require_refused({
      {{"--data", "mnist"}, "cifar10:DIR"},
      {{"--data", "cifar10:" + nowhere}, nowhere},
      {{"--data", "cifar10:" + truncated}, truncated + "/data_batch_1.bin"},
      {{"--classes", "3"}, "--classes 3 are too few: the data has 10"},
  });
  CHECK_THAT(refusal_of({"--batch", "10000"}, 4),
             Catch::Matchers::Contains("too few for 4 workers with batches of 10000"));
}

TEST_CASE("refusals: a device that is not there is named") {
  if (torch::cuda::is_available()) {
    WARN("skipped: there is a CUDA device");
    return;
  }
  CHECK_THAT(refusal_of({"--device", "cuda"}),
             Catch::Matchers::Contains("--device cuda: this libtorch finds no CUDA device"));
}
