// SPDX-License-Identifier: MIT
#include "launch/options.hpp"

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
      "Trains ResNet-50 v1 with a parameter server, without and with layer dropping, on the same data from "
      "the same start. Over MPI rank 0 is the server and every other rank a worker; in an allreduce, every "
      "rank is one.");
  app.get_formatter()->column_width(34);
  app.option_defaults()->always_capture_default();

  const std::string data = "Data and network";
  app.add_option("--data", given.data, "cifar10:DIR, imagefolder:DIR or synthetic")->group(data);
  app.add_option("--image-size", given.image_size_pixels,
                 "pixels a side; 0: the data set's own (32, 224, 32)")
      ->check(CLI::Range(0, 4096))
      ->group(data);
  app.add_flag("--small-stem", given.small_stem,
               "3x3 first convolution without pooling, for small images; slower")
      ->group(data);
  app.add_option("--classes", given.classes, "outputs of the network; 0: as many as the data has classes")
      ->check(CLI::Range(0, 1 << 20))
      ->group(data);
  app.add_option("--batch", given.batch_images, "images a worker in each step")
      ->check(CLI::Range(2, 1 << 20))
      ->group(data);
  app.add_option("--steps", given.steps, "steps of each run")
      ->check(counted)
      ->check(at_least_one)
      ->group(data);
  app.add_option("--seed", given.seed, "of the parameters, the data and their order")
      ->check(counted)
      ->group(data);

  const std::string dropping = "Layer dropping";
  app.add_option("--runs", given.runs, "layer dropping: both, with or without")
      ->check(CLI::IsMember({"both", "with", "without"}))
      ->group(dropping);
  app.add_option("--drop-ratio", given.drop_ratio,
                 "R: share of the elements to hold back; 0 sends everything")
      ->check(finite)
      ->check(CLI::Range(0.0, 1.0))
      ->group(dropping);
  app.add_option("--drop-warm-up", given.drop_warm_up_steps, "steps in which R grows to that")
      ->check(counted)
      ->group(dropping);
  CLI::Option* refresh =
      app.add_option("--refresh", given.refresh_steps,
                     "steps between searches for the threshold; the paper has 100; 0: the first step alone")
          ->check(counted)
          ->group(dropping);
  CLI::Option* threshold = app.add_option("--threshold", given.threshold,
                                          "a threshold of your own, never searched; in place of --drop-ratio")
                               ->check(finite)
                               ->excludes(refresh)
                               ->group(dropping);
  app.add_option("--budget", given.byte_budget,
                 "share of the bytes to send, kept to over time; in place of --drop-ratio")
      ->check(finite)
      ->check(CLI::Range(1e-6, 1.0))
      ->excludes(refresh)
      ->excludes(threshold)
      ->group(dropping);
  app.add_option("--selection", given.selection,
                 "local: each worker decides; agreed: all by their mean values")
      ->check(CLI::IsMember({"local", "agreed"}))
      ->group(dropping);
  app.add_option("--max-age", given.max_age_steps,
                 "steps after which a layer held back is sent anyway; 0: never")
      ->check(counted)
      ->group(dropping);
  app.add_option("--part-elements", given.part_elements,
                 "cut larger layers into parts of so many elements, a multiple of 4096; 0: whole layers")
      ->check(counted)
      ->group(dropping);
  app.add_option("--residual-momentum", given.residual_momentum,
                 "momentum correction in the residual; then without --momentum at the server")
      ->check(finite)
      ->check(CLI::Range(0.0, 0.9999))
      ->group(dropping);
  app.add_option("--payload", given.payload, "how the elements sent are written")
      ->check(CLI::IsMember({"as_is", "float16", "bfloat16", "int8"}))
      ->group(dropping);

  const std::string server = "The server";
  app.add_option("--mode", given.mode, "sync: waits for all workers; async: applies each frame when it comes")
      ->check(CLI::IsMember({"sync", "async"}))
      ->group(server);
  CLI::Option* topology =
      app.add_option("--topology", given.topology,
                     "ps: every worker talks to the server; hybrid: the workers of a node sum first, one of "
                     "them talks to it; allreduce: no server, needs agreed selection; "
                     "mpi_allreduce: no server and no lamina, to compare with")
          ->check(CLI::IsMember({"ps", "hybrid", "allreduce", "mpi_allreduce"}))
          ->group(server);
  app.add_option("--workers-per-node", given.workers_per_node,
                 "workers in a row that make a node of --topology hybrid; without it those of a machine do")
      ->check(counted)
      ->check(at_least_one)
      ->needs(topology)
      ->group(server);
  app.add_option("--transport", given.transport,
                 "mpi, or inprocess: server and workers in turn in one process, with the same bits at the "
                 "same --threads")
      ->check(CLI::IsMember({"mpi", "inprocess"}))
      ->group(server);
  app.add_option("--learning-rate", given.learning_rate,
                 "of SGD; 0: 0.03 for synthetic, 0.01 for photographs")
      ->check(finite)
      ->check(CLI::NonNegativeNumber)
      ->group(server);
  app.add_option("--schedule", given.schedule,
                 "of the learning rate: constant, step:EVERY:GAMMA, milestones:S1,S2:GAMMA, cosine, "
                 "cosine:FINAL_FRACTION")
      ->group(server);
  app.add_option("--warm-up", given.warm_up_steps, "steps in which the learning rate grows from zero")
      ->check(counted)
      ->group(server);
  app.add_option("--momentum", given.momentum, "of SGD; layers that nobody sent are frozen")
      ->check(finite)
      ->check(CLI::Range(0.0, 0.9999))
      ->group(server);
  app.add_flag("--nesterov", given.nesterov, "Nesterov's momentum")->group(server);
  app.add_option("--weight-decay", given.weight_decay,
                 "of SGD; a layer that did not arrive decays when it does")
      ->check(finite)
      ->check(CLI::NonNegativeNumber)
      ->group(server);
  CLI::Option* evaluations = app.add_option("--evaluate-every", given.evaluation_period_steps,
                                            "steps between evaluations; 0: at the end alone")
                                 ->check(counted)
                                 ->group(server);
  app.add_flag("--no-evaluation", given.no_evaluation, "no evaluation, not even at the end")
      ->excludes(evaluations)
      ->group(server);

  const std::string run = "The run";
  CLI::Option* output =
      app.add_option("--output", given.output, "directory for the metrics of each run, which ./plot draws")
          ->group(run);
  app.add_option("--load", given.load, "model to begin from: a file of --save, or of torch.jit in Python")
      ->group(run);
  app.add_option("--save", given.save,
                 "file for the trained model, written by worker 0 before the last evaluation; "
                 "torch.jit.load reads it in Python")
      ->group(run);
  app.add_option("--checkpoint-every", given.checkpoint_period_steps,
                 "steps between checkpoints in the output directory, and one at the end; 0: none")
      ->check(counted)
      ->needs(output)
      ->group(run);
  CLI::Option* resume =
      app.add_flag("--resume", given.resume, "go on from the newest checkpoint in the output directory")
          ->needs(output)
          ->group(run);
  app.add_flag("--merge-residuals", given.merge_residuals,
               "with --resume: take up a checkpoint of another number of workers, which get the mean of its "
               "residuals")
      ->needs(resume)
      ->group(run);
  app.add_flag("--degraded", given.degraded,
               "go on without workers that are lost, at a mean over those that are left; see --timeout")
      ->group(run);
  app.add_option("--interval", given.interval, "steps between printed lines")
      ->check(counted)
      ->check(at_least_one)
      ->group(run);
  app.add_option(
         "--progress", given.progress_columns,
         "columns of the terminal, whose last line then shows how far the run is; 0: there is none (./run "
         "gives it)")
      ->check(counted)
      ->group(run);
  app.add_option(
         "--workers", given.workers,
         "how many workers to start (./run reads it; default 2); mpirun starts the server's rank with them")
      ->check(counted)
      ->check(at_least_one)
      ->group(run);
  app.add_option("--device", given.device, "where the workers compute: cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->group(run);
  app.add_option("--threads", given.threads,
                 "threads a worker; 0: the machine's cores shared among its workers")
      ->check(CLI::NonNegativeNumber)
      ->group(run);
  app.add_option("--timeout", given.timeout_seconds,
                 "seconds without a sign of a peer, which may be computing, after which it counts as lost")
      ->check(counted)
      ->check(CLI::Range(1, 1'000'000))
      ->group(run);

  app.add_option(
         "--done-file", given.done_file,
         "is made when the run has succeeded: mpirun --enable-recovery ends with status 0 in any case")
      ->group(run);

  const std::string network = "Experiments on a network";
  CLI::Option* record =
      app.add_option("--record", given.record, "directory for the gradients of each worker's last six steps")
          ->group(network);
  CLI::Option* replay =
      app.add_option("--replay", given.replay,
                     "directory of recorded gradients, which the workers send in place of computing any")
          ->excludes(record)
          ->group(network);
  app.add_option("--compute-seconds", given.compute_seconds,
                 "what it takes a worker to come by its gradients, waited out")
      ->check(finite)
      ->check(CLI::NonNegativeNumber)
      ->needs(replay)
      ->group(network);
  app.add_option("--server-seconds", given.server_seconds,
                 "what it takes the synchronous server to apply them, waited out if it is quicker")
      ->check(finite)
      ->check(CLI::NonNegativeNumber)
      ->needs(replay)
      ->group(network);

  try {
    app.parse(argc, argv);
    for (int i = 1; i < argc; ++i) given.command_line += (i > 1 ? " " : "") + std::string(argv[i]);
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
