// SPDX-License-Identifier: MIT
#include "launch/options.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <sstream>

#include "launch/local_updates.hpp"
#include "launch/numbers.hpp"
#include "launch/overlap.hpp"

namespace lab {
namespace {

const CLI::Validator at_least_one(
    [](const std::string& text) {
      return text.find_first_of("123456789") == std::string::npos ? text + " is less than 1" : std::string();
    },
    "");

// What depends on other options.
void set_defaults(lab::options& options) {
  if (options.selection.empty()) options.selection = options.mode == "async" ? "local" : "agreed";
  if (!options.runs.empty()) return;
  const bool has_checkpoints = options.checkpoint_period_steps > 0 || options.resume;
  if (options.topology == "mpi_allreduce") {
    options.runs = "without";
  } else {
    options.runs = options.transport == "mpi" && !has_checkpoints ? "all" : "both";
  }
}

}  // namespace

parsed parse_options(int argc, char** argv, const option_hook& add_options) {
  parsed result;
  lab::options& options = result.options;
  CLI::App app(
      "Trains ResNet-50 v1 or VGG-16 with a parameter server, without and with layer dropping, on the same "
      "data from "
      "the same start. Over MPI rank 0 is the server and every other rank a worker; in an allreduce, every "
      "rank is one.");
  app.get_formatter()->column_width(34);
  app.option_defaults()->always_capture_default();

  const std::string data = "Data and network";
  app.add_option("--data", options.data, "cifar10:DIR, imagefolder:DIR or synthetic")->group(data);
  app.add_option("--network", options.network, "resnet50: v1, 25.6 million parameters; vgg16: 138.4 million")
      ->check(CLI::IsMember({"resnet50", "vgg16"}))
      ->group(data);
  app.add_option("--image-size", options.image_size_pixels,
                 "pixels a side; 0: the data set's own (32, 224, 32)")
      ->check(CLI::Range(0, 4096))
      ->group(data);
  app.add_flag("--small-stem", options.small_stem,
               "3x3 first convolution of resnet50 without pooling, for small images; slower")
      ->group(data);
  app.add_option("--classes", options.classes, "outputs of the network; 0: as many as the data has classes")
      ->check(CLI::Range(0, 1 << 20))
      ->group(data);
  app.add_option("--batch", options.batch_images, "images a worker in each step")
      ->check(CLI::Range(2, 1 << 20))
      ->group(data);
  app.add_option("--steps", options.steps, "steps of each run")
      ->check(counted)
      ->check(at_least_one)
      ->group(data);
  app.add_option("--seed", options.seed, "of the parameters, the data and their order")
      ->check(counted)
      ->group(data);

  const std::string dropping = "Layer dropping";
  app.add_option(
         "--runs", options.runs,
         "with or without layer dropping, both, or all: first by plain MPI_Allreduce, too; the default is "
         "all, in one process and with checkpoints both")
      ->check(CLI::IsMember({"all", "both", "with", "without"}))
      ->group(dropping);
  app.add_option("--drop-ratio", options.drop_ratio,
                 "R: share of the elements to hold back; 0 sends everything")
      ->check(finite)
      ->check(CLI::Range(0.0, 1.0))
      ->group(dropping);
  app.add_option(
         "--drop-warm-up", options.drop_warm_up_steps,
         "steps in which R grows to --drop-ratio: the first gradients, which change fast, go out more often")
      ->check(counted)
      ->group(dropping);
  CLI::Option* refresh =
      app.add_option("--refresh", options.refresh_steps,
                     "steps between searches for the threshold; the paper has 100; 0: the first step alone")
          ->check(counted)
          ->group(dropping);
  CLI::Option* threshold = app.add_option("--threshold", options.threshold,
                                          "a threshold of your own, never searched; in place of --drop-ratio")
                               ->check(finite)
                               ->excludes(refresh)
                               ->group(dropping);
  app.add_option("--budget", options.byte_budget,
                 "share of the elements to send, kept to over time; in place of --drop-ratio")
      ->check(finite)
      ->check(CLI::Range(1e-6, 1.0))
      ->excludes(refresh)
      ->excludes(threshold)
      ->group(dropping);
  app.add_option("--selection", options.selection,
                 "local: each worker decides; agreed: all by their mean values; the default is agreed, with "
                 "--mode async local")
      ->check(CLI::IsMember({"local", "agreed"}))
      ->group(dropping);
  app.add_option("--max-age", options.max_age_steps,
                 "steps after which a layer held back is sent anyway; 0: never")
      ->check(counted)
      ->group(dropping);
  app.add_option("--part-elements", options.part_elements,
                 "cut larger layers into parts of so many elements, a multiple of 4096; 0: whole layers")
      ->check(counted)
      ->group(dropping);
  app.add_option("--residual-momentum", options.residual_momentum,
                 "momentum correction in the residual; then without --momentum at the server")
      ->check(finite)
      ->check(CLI::Range(0.0, 0.9999))
      ->group(dropping);
  app.add_option("--payload", options.payload, "how the elements sent are written")
      ->check(CLI::IsMember({"as_is", "float16", "bfloat16", "int8", "int4"}))
      ->group(dropping);

  app.add_option(
         "--priority", options.priority,
         "by what layers are chosen: value, or value_times_waiting, their value times the steps since "
         "they were last sent")
      ->check(CLI::IsMember({"value", "value_times_waiting"}))
      ->group(dropping);

  const std::string server = "The server";
  app.add_option("--mode", options.mode,
                 "sync: waits for all workers; async: applies each frame when it comes")
      ->check(CLI::IsMember({"sync", "async"}))
      ->group(server);
  app.add_option(
         "--staleness", options.staleness_steps,
         "with --mode async: steps that a worker may be ahead of the slowest, for which it then waits; "
         "without it any number")
      ->check(counted)
      ->group(server);
  CLI::Option* topology =
      app.add_option("--topology", options.topology,
                     "ps: every worker talks to the server; hybrid: the workers of a node sum first, one of "
                     "them talks to it; allreduce: no server, needs agreed selection; "
                     "mpi_allreduce: no server and no lamina, to compare with")
          ->check(CLI::IsMember({"ps", "hybrid", "allreduce", "mpi_allreduce"}))
          ->group(server);
  app.add_option("--workers-per-node", options.workers_per_node,
                 "workers in a row that make a node of --topology hybrid; without it those of a machine do")
      ->check(counted)
      ->check(at_least_one)
      ->needs(topology)
      ->group(server);
  app.add_option(
         "--transport", options.transport,
         "mpi; udp: frames as packets over UDP, whose ranks mpirun starts as well; or inprocess: server "
         "and workers in turn in one process, with the same bits at the same --threads")
      ->check(CLI::IsMember({"mpi", "udp", "inprocess"}))
      ->group(server);
  app.add_option("--learning-rate", options.learning_rate, "of SGD")
      ->check(finite)
      ->check(CLI::NonNegativeNumber)
      ->group(server);
  app.add_option("--schedule", options.schedule,
                 "of the learning rate: constant, cosine, cosine:FINAL_FRACTION")
      ->group(server);
  app.add_option("--warm-up", options.warm_up_steps, "steps in which the learning rate grows from zero")
      ->check(counted)
      ->group(server);
  app.add_option("--momentum", options.momentum, "of SGD; layers that nobody sent are frozen")
      ->check(finite)
      ->check(CLI::Range(0.0, 0.9999))
      ->group(server);
  app.add_flag("--nesterov", options.nesterov, "Nesterov's momentum")->group(server);
  app.add_option("--weight-decay", options.weight_decay,
                 "of SGD; a layer that did not arrive decays when it does")
      ->check(finite)
      ->check(CLI::NonNegativeNumber)
      ->group(server);
  CLI::Option* evaluations = app.add_option("--evaluate-every", options.evaluation_period_steps,
                                            "steps between evaluations; 0: at the end alone")
                                 ->check(counted)
                                 ->group(server);
  app.add_flag("--no-evaluation", options.no_evaluation, "no evaluation, not even at the end")
      ->excludes(evaluations)
      ->group(server);

  const std::string losses = "Lost packets (with --transport udp, or inprocess, whose network is simulated)";
  app.add_option("--loss-bound", options.loss_bound,
                 "share of each layer's gradients that may be missing when a transfer ends")
      ->check(finite)
      ->check(CLI::Range(0.0, 0.5))
      ->group(losses);
  app.add_option("--loss-bound-down", options.loss_bound_down,
                 "the same of parameters; what was lost comes with the next transfer")
      ->check(finite)
      ->check(CLI::Range(0.0, 0.5))
      ->group(losses);
  app.add_option("--loss-bound-warm-up", options.loss_bound_warm_up_steps,
                 "steps in which both bounds grow from zero")
      ->check(counted)
      ->group(losses);
  app.add_option("--stop", options.stop,
                 "when a transfer ends: eager, as soon as it is within its bound, or on-probe, when all has "
                 "come or all that was asked for was sent")
      ->check(CLI::IsMember({"eager", "on-probe"}))
      ->group(losses);
  app.add_option("--on-loss", options.on_loss,
                 "gradients that were lost: return, into the residual of their worker, or zero: gone")
      ->check(CLI::IsMember({"return", "zero"}))
      ->group(losses);
  app.add_option("--max-losses", options.max_losses,
                 "with --on-loss return: a chunk that was lost so often in a row must arrive; 0: never")
      ->check(counted)
      ->check(CLI::Range(0, 255))
      ->group(losses);
  app.add_option("--loss-tags", options.loss_tags,
                 "on: of each layer the smallest chunks go last, and are lost first; off: as they lie")
      ->check(CLI::IsMember({"on", "off"}))
      ->group(losses);
  app.add_option("--inject-loss", options.inject_loss, "share of the packets that the network loses")
      ->check(finite)
      ->check(CLI::Range(0.0, 0.7))
      ->group(losses);
  app.add_option("--inject-seed", options.inject_seed, "of which packets it loses")
      ->check(counted)
      ->check(CLI::Range(std::uint64_t{0}, std::uint64_t{0xffffffff}))
      ->group(losses);

  const std::string sockets = "Sockets (with --transport udp)";
  app.add_option(
         "--interface", options.interfaces,
         "network of the addresses to use, as 10.77.0.0/24; several, with commas, are as many paths that "
         "packets take in turns; without it the first address that is not loopback, or loopback on one "
         "machine")
      ->group(sockets);
  app.add_option("--link-rate", options.link_rate_bits,
                 "bits a second of each machine's link; 0: not known, and found out by loss")
      ->check(link_rate)
      ->group(sockets);
  app.add_option("--mtu", options.mtu,
                 "largest packet of the network, in bytes with its headers of IP and UDP")
      ->check(counted)
      ->check(CLI::Range(576, 65535))
      ->group(sockets);
  add_local_update_options(app, options);
  add_overlap_options(app, options);

  const std::string run = "The run";
  CLI::Option* output =
      app.add_option("--output", options.output, "directory for the metrics of each run, which ./plot draws")
          ->group(run);
  app.add_option("--load", options.load, "model to begin from: a file of --save, or of torch.jit in Python")
      ->group(run);
  app.add_option("--save", options.save,
                 "file for the trained model, written by worker 0 before the last evaluation; "
                 "torch.jit.load reads it in Python")
      ->group(run);
  app.add_option("--checkpoint-every", options.checkpoint_period_steps,
                 "steps between checkpoints in the output directory, and one at the end; 0: none")
      ->check(counted)
      ->needs(output)
      ->group(run);
  CLI::Option* resume =
      app.add_flag("--resume", options.resume, "go on from the newest checkpoint in the output directory")
          ->needs(output)
          ->group(run);
  app.add_flag("--merge-residuals", options.merge_residuals,
               "with --resume: take up a checkpoint of another number of workers, which get the mean of its "
               "residuals")
      ->needs(resume)
      ->group(run);
  app.add_flag(
         "--change-exchange", options.changes_exchange,
         "with --resume: take up a checkpoint whose workers exchanged gradients in another way, by another "
         "--topology, --overlap, --exchange, --collectives, --fc-exchange or plan")
      ->needs(resume)
      ->group(run);
  app.add_flag("--degraded", options.degraded,
               "go on without workers that are lost, at a mean over those that are left; see --timeout")
      ->group(run);
  app.add_option("--interval", options.interval, "steps between printed lines")
      ->check(counted)
      ->check(at_least_one)
      ->group(run);
  app.add_option(
         "--progress", options.progress_columns,
         "columns of the terminal, whose last line then shows how far the run is; 0: there is none (./run "
         "gives it)")
      ->check(counted)
      ->group(run);
  app.add_option(
         "--workers", options.workers,
         "how many workers to start (./run reads it; default 2); mpirun starts the server's rank with them")
      ->check(counted)
      ->check(at_least_one)
      ->group(run);
  app.add_option("--device", options.device, "where the workers compute: cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->group(run);
  app.add_option("--threads", options.threads,
                 "threads a worker; 0: the machine's cores shared among its workers")
      ->check(CLI::NonNegativeNumber)
      ->group(run);
  app.add_option("--timeout", options.timeout_seconds,
                 "seconds without a sign of a peer, which may be computing, after which it counts as lost")
      ->check(counted)
      ->check(CLI::Range(1, 1'000'000))
      ->group(run);

  app.add_option(
         "--done-file", options.done_file,
         "is made when the run has succeeded: mpirun --enable-recovery ends with status 0 in any case")
      ->group(run);

  if (add_options) add_options(app);

  try {
    app.parse(argc, argv);
    for (int i = 1; i < argc; ++i) options.command_line += (i > 1 ? " " : "") + std::string(argv[i]);
    set_defaults(options);
    for (const std::string& mistake : {mistake_in_local_updates(options), mistake_in_overlap(options)}) {
      if (!mistake.empty()) throw CLI::ValidationError(mistake, CLI::ExitCodes::ValidationError);
    }
  } catch (const CLI::ParseError& error) {
    std::ostringstream text;
    const int code = app.exit(error, text, text);
    result.exit_code = code == 0 ? 0 : 2;  // the usual status for a command line that is wrong
    result.message = text.str();
  }
  return result;
}

}  // namespace lab
