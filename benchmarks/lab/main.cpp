// SPDX-License-Identifier: MIT
// Trains a network for an experiment: with a parameter server, or with sums that overlap with backward. One run, whose steps rank 0 writes to
// standard output, a line of JSON each. Started by mpirun; see --help.
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "training.hpp"

namespace lab {
namespace {

void add_options(CLI::App& app, options& into) {
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto one_of = [](std::vector<std::string> words) { return CLI::IsMember(std::move(words)); };
  const auto add = [&](const char* group, const char* name, auto& value, const char* what) {
    return app.add_option(name, value, what)->group(group);
  };
  const auto share = CLI::Range(0.0, 1.0);
  const CLI::Range some(std::uint64_t{1}, std::uint64_t{1} << 40U);

  const char* const data = "Data and network";
  add(data, "--data", into.data, "cifar10:DIR, imagefolder:DIR or synthetic");
  add(data, "--network", into.network, "what is trained")->check(one_of({"resnet50", "vgg16", "tiny"}));
  add(data, "--image-size", into.image_size_pixels, "pixels a side; 0: 32")->check(CLI::Range(0, 4096));
  add(data, "--classes", into.classes, "outputs of the network")->check(CLI::Range(10, 1 << 20));
  add(data, "--batch", into.batch_images, "images of a worker in each step")->check(CLI::Range(2, 1 << 20));
  add(data, "--steps", into.steps, "steps")->check(some);
  add(data, "--seed", into.seed, "of the parameters, the data and their order");
  add(data, "--learning-rate", into.learning_rate, "of SGD")->check(CLI::NonNegativeNumber);
  add(data, "--warm-up", into.warm_up_steps, "steps in which the learning rate grows from zero");
  add(data, "--momentum", into.momentum, "of SGD; a layer that nobody sent does not move")
      ->check(CLI::Range(0.0, 0.9999));
  app.add_flag("--no-evaluation", into.no_evaluation, "none at the end")->group(data);

  const char* const dropping = "Layer dropping";
  add(dropping, "--drop-ratio", into.drop_ratio, "R: share of the elements to drop; 0 sends everything")
      ->check(share);
  add(dropping, "--budget", into.send_budget,
      "share of the elements to send, on average over time; in place of R")
      ->check(CLI::Range(1e-6, 1.0));
  add(dropping, "--drop-warm-up", into.drop_warm_up_steps, "steps in which R grows to --drop-ratio");
  add(dropping, "--refresh", into.refresh_steps,
      "steps between searches for the threshold; the paper has 100")
      ->check(some);
  add(dropping, "--selection", into.selection, "local: each worker decides; agreed: all by their mean values")
      ->check(one_of({"local", "agreed"}));
  add(dropping, "--fragment-elements", into.fragment_elements,
      "cut larger layers into fragments of so many elements, a multiple of 4096; 0: whole layers");
  add(dropping, "--residual-momentum", into.residual_momentum,
      "momentum correction in the residual; without --momentum")
      ->check(CLI::Range(0.0, 0.9999));

  const char* const ranks = "Ranks";
  add(ranks, "--topology", into.topology,
      "ps: rank 0 is a parameter server; allreduce: all ranks are workers; mpi_allreduce: the same without "
      "lamina")
      ->check(one_of({"ps", "allreduce", "mpi_allreduce"}));
  add(ranks, "--workers-per-node", into.workers_per_node,
      "with ps: workers in a row that add their gradients up and send once")
      ->check(some);
  add_link_options(app, ranks, into.links);
  add(ranks, "--timeout", into.timeout_seconds, "seconds without progress after which the run ends")
      ->check(CLI::Range(1, 86400));

  const char* const sums = "All-reduce";
  add(sums, "--overlap", into.overlap,
      "when gradients are summed. none: after the backward pass; backward: during it; step: also during the "
      "next forward pass, where a layer is waited for when it is needed")
      ->check(one_of({"none", "backward", "step"}));
  add(sums, "--decide", into.decide,
      "when the layers of a step are chosen. at_end: after the backward pass; ahead: in the step before")
      ->check(one_of({"at_end", "ahead"}));
  add(sums, "--exchange", into.exchange,
      "sums: every worker updates everything; owners: each its shards, and hands the parameters round")
      ->check(one_of({"sums", "owners"}));
  add(sums, "--collectives", into.collectives,
      "how a sum is made; by_type: a butterfly for convolutions, a ring for fully connected layers")
      ->check(one_of({"pairwise", "ring", "halving_doubling", "by_type"}));
  add(sums, "--sum-payload", into.sum_payload, "as what gradients travel to be summed, and sums back")
      ->check(one_of({"as_is", "bfloat16"}));
  add(sums, "--bucket-bytes", into.bucket_bytes,
      "layers are summed together until they have so many bytes; 0: each by itself");

  const char* const replaying = "Experiments on a network";
  add(replaying, "--record", into.record,
      "directory for the gradients of each worker's last steps, and the profile of the last one");
  add(replaying, "--record-steps", into.recorded_steps, "how many steps' gradients; 0: the profile only");
  add(replaying, "--replay", into.replay,
      "directory of recorded gradients, which are sent in place of computing any");
  app.add_flag("--by-layer", into.by_layer,
               "the seconds of computing pass layer by layer, as in the recorded profile")
      ->group(replaying);
  add(replaying, "--compute-seconds", into.compute_seconds, "what gradients take a worker, waited out")
      ->check(CLI::Range(0.0, 1e6));
  add(replaying, "--server-seconds", into.server_seconds, "what a step takes the server at least")
      ->check(CLI::Range(0.0, 1e6));
}

// Why these options cannot be meant together; empty: they can.
std::string mistake_in(const options& given) {
  const auto needs = [](const std::string& what, const std::string& other) {
    return what + " needs " + other;
  };
  const bool sums = given.topology == "allreduce";
  if (!given.has_server() && (given.links.is_lossy() || given.workers_per_node > 1))
    return needs("--transport udp and --workers-per-node", "--topology ps");
  if (const std::string mistake = given.links.mistake(); !mistake.empty()) return mistake;
  if (!sums && (given.overlaps() || given.decide == "ahead" || given.exchange == "owners" ||
                given.collectives != "pairwise" || given.sum_payload != "as_is" || given.bucket_bytes))
    return needs("an option of the all-reduce", "--topology allreduce");
  if (sums && given.drops_layers() && given.selection != "agreed")
    return needs("--topology allreduce", "--selection agreed: all must send the same layers");
  if (given.topology == "mpi_allreduce" && given.drops_layers())
    return needs("--topology mpi_allreduce", "--drop-ratio 0: it has no layer dropping");
  if (given.overlaps() && given.drops_layers() && given.decide != "ahead")
    return needs("--overlap with layer dropping",
                 "--decide ahead: else no layer is chosen before backward ends");
  if (given.exchange == "owners" && given.drops_layers()) return needs("--exchange owners", "--drop-ratio 0");
  if (given.sum_payload != "as_is" && given.collectives != "pairwise")
    return needs("--sum-payload", "--collectives pairwise: others would round on the way");
  if (given.residual_momentum > 0 && !given.drops_layers())
    return needs("--residual-momentum", "--drop-ratio above 0");
  if (!given.record.empty() && !given.replay.empty()) return "--record and --replay: give one";
  if (given.replay.empty() && (given.by_layer || given.compute_seconds > 0 || given.server_seconds > 0))
    return needs("--by-layer, --compute-seconds or --server-seconds", "--replay");
  return "";
}

void train(const options& how) {
  torch::set_num_threads(1);
  const std::chrono::seconds timeout(how.timeout_seconds);
  work_clock clock;
  mpi_ranks all(MPI_COMM_WORLD, timeout, clock);
  training run(how, all, clock);
  if (how.topology == "allreduce") return train_by_sums(run);
  if (how.topology == "mpi_allreduce") return train_plainly(run);
  std::unique_ptr<way> over;
  if (run.callers)
    over = open_way(run.callers->communicator(), run.local.model(), how.links, timeout,
                    [&](std::size_t rank) { return run.name_of_caller(rank); });
  if (run.is_server) return serve(run, *over);
  work(run, over.get());
}

}  // namespace
}  // namespace lab

int main(int argc, char** argv) {
  lab::options how;
  CLI::App app(
      "Trains a network for an experiment: with a parameter server, or with sums that overlap with "
      "backward.");
  lab::add_options(app, how);
  CLI11_PARSE(app, argc, argv);
  if (const std::string mistake = lab::mistake_in(how); !mistake.empty()) {
    std::fprintf(stderr, "lab: %s\n", mistake.c_str());
    return EXIT_FAILURE;
  }
  how.links.inject_seed = how.seed;
  // Collectives during the computation have a thread that calls MPI as well.
  const int threads = how.topology == "allreduce" ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED;
  return lab::run_ranks("lab", argc, argv, threads, [&] { lab::train(how); });
}
