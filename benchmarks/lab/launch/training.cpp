// SPDX-License-Identifier: MIT
#include "launch/training.hpp"

#include <fmt/format.h>
#include <torch/cuda.h>
#include <torch/utils.h>

#include <cmath>
#include <lamina/frame.hpp>
#include <lamina/partition.hpp>
#include <stdexcept>
#include <string>

#include "data/batches.hpp"
#include "launch/local_updates.hpp"
#include "launch/overlap.hpp"
#include "model/model_file.hpp"
#include "model/network.hpp"
#include "model/vgg.hpp"
#include "state/saved_run.hpp"

namespace lab {
namespace {

std::uint32_t in_ppm(double share) {
  return static_cast<std::uint32_t>(std::llround(share * 1e6));
}

// Without the headers of IP, UDP and the packet.
std::size_t packet_data_bytes(const training& run) {
  const bool is_v6 = !run.paths.empty() && run.paths[0].is_v6 != 0;
  return run.options.mtu - (is_v6 ? 48 : 28) - lamina::bounded::packet_header_bytes;
}

loss_plan losses_of(const training& run) {
  const lab::options& options = run.options;
  return {.is_lossy = cuts_frames(options),
          .bound_up_ppm = in_ppm(options.loss_bound),
          .bound_down_ppm = in_ppm(options.loss_bound_down),
          .warm_up_steps = options.loss_bound_warm_up_steps,
          .returns_lost = options.on_loss == "return",
          .max_losses = options.max_losses,
          .has_tags = options.loss_tags == "on",
          .packet_data_bytes = packet_data_bytes(run)};
}

lamina::compressor_options compression_of(const training& run, std::size_t sender) {
  const lab::options& options = run.options;
  lamina::compressor_options compression;
  compression.sender = static_cast<std::uint32_t>(sender);
  compression.part_elements = options.part_elements;
  compression.momentum = options.residual_momentum;
  compression.drop_ratio = 0;
  compression.frame_checksum = checksum_of(losses_of(run));
  if (options.decide == "as_ready") compression.decide = lamina::decision_timing::as_ready;
  // Where nothing is held back, gradients are summed as they are, unless the residual is to correct for momentum.
  const bool overlaps = options.overlap != "none" && options.residual_momentum > 0;
  if (options.decide == "ahead" ? run.layer_dropping : overlaps && options.decide == "at_end")
    compression.decide = lamina::decision_timing::ahead;
  // What sums round away of gradients then stays in the residual.
  if (options.overlap != "none") compression.payload = payload_named(options.sum_payload);
  if (!run.layer_dropping) return compression;

  compression.drop_ratio = options.drop_ratio;
  compression.warm_up_steps = options.drop_warm_up_steps;
  compression.byte_budget = options.byte_budget;
  compression.max_age = options.max_age_steps;
  if (options.overlap == "none") compression.payload = payload_named(options.payload);
  if (options.priority == "value_times_waiting")
    compression.priority = lamina::priority_rule::value_times_waiting;
  if (options.threshold) {
    compression.refresh = lamina::refresh_schedule::fixed(*options.threshold);
  } else if (options.refresh_steps == 0) {
    compression.refresh = lamina::refresh_schedule::every(~std::uint64_t{0});
  } else {
    compression.refresh = lamina::refresh_schedule::every(options.refresh_steps);
  }
  return compression;
}

// The workers of a machine share its devices out among themselves.
torch::Device device_of(const training& run) {
  if (run.options.device == "cpu") return torch::kCPU;
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(run.place_on_machine % torch::cuda::device_count())};
}

}  // namespace

training plain_run(const training& compared) {
  training plain = compared;
  plain.options.topology = "mpi_allreduce";
  plain.topology = allreduce_topology(compared.topology.workers());
  plain.layer_dropping = false;
  return plain;
}

replica make_replica(const training& run, bool is_worker) {
  torch::manual_seed(run.options.seed);
  const model_options network{run.options.classes > 0 ? run.options.classes : run.data.train->classes(),
                              run.options.small_stem ? stem::small : stem::standard};
  torch::nn::AnyModule made = make_network(run.options.network, network);
  if (!run.options.load.empty()) load_model(*made.ptr(), run.options.load);
  return replica{made, run.options.part_elements, is_worker ? device_of(run) : torch::Device(torch::kCPU)};
}

std::size_t largest_message_bytes(const training& run, const replica& local) {
  std::size_t statistics_bytes = 0;
  for (const torch::Tensor& each : local.statistics()) statistics_bytes += each.nbytes();
  // The longest begins a resumed allreduce: parameters, velocity, and what its compressor keeps, a residual and its momentum.
  // That of a node has the statistics of all its workers.
  // A worker on local updates has its own parameters beside the shared ones, and what is under way.
  const std::size_t copies = run.options.updates == "local" ? 6 + run.options.delay_steps : 4;
  const std::size_t states_bytes = copies * local.model().elements() * sizeof(float) +
                                   run.topology.workers() * (statistics_bytes + 4096) +
                                   64 * local.model().layers();
  return lamina::largest_frame_bytes<float>(local.model()) + states_bytes + (std::size_t{1} << 20);
}

lamina::bounded::stop_policy stop_of(const lab::options& options) {
  return options.stop == "eager" ? lamina::bounded::stop_policy::eager
                                 : lamina::bounded::stop_policy::on_probe;
}

lamina::frame_kind frames_up(const lab::options& options) {
  return options.updates == "local" ? lamina::frame_kind::updates : lamina::frame_kind::gradients;
}

std::optional<lossy_options> network_of(const training& run) {
  const lab::options& options = run.options;
  if (!may_lose(options)) return std::nullopt;
  const loss_plan plan = losses_of(run);
  return lossy_options{.loss = options.inject_loss,
                       .seed = options.inject_seed,
                       .stop = stop_of(options),
                       .up = frames_up(options),
                       .most_bound_up_ppm = plan.bound_up_ppm,
                       .most_bound_down_ppm = plan.bound_down_ppm};
}

training_plan plan_of(const training& run, std::uint64_t steps_done) {
  const lab::options& options = run.options;
  return {
      .steps = options.steps,
      .steps_done = steps_done,
      .agrees_on_selection = run.layer_dropping && options.selection == "agreed",
      .evaluates = !options.no_evaluation,
      .evaluation_period_steps = options.evaluation_period_steps,
      // A server is ahead of its workers where it does not wait for them, and where they apply what it sends later.
      .hash_period_steps =
          options.mode == "sync" && options.delay_steps == 0 ? std::uint64_t{100} : std::uint64_t{0},
      .checkpoint_period_steps = options.checkpoint_period_steps,
      .saves_model = !options.save.empty(),
      .losses = losses_of(run),
  };
}

server_options server_options_of(const training& run, std::uint64_t steps_done) {
  const lab::options& options = run.options;
  return {
      .plan = plan_of(run, steps_done),
      .optimizer = {.learning_rate = options.learning_rate,
                    .momentum = options.momentum,
                    .weight_decay = options.weight_decay,
                    .nesterov = options.nesterov},
      .learning_rate =
          parse_schedule(options.schedule, options.learning_rate, options.steps, options.warm_up_steps),
      .staleness_steps = options.staleness_steps,
  };
}

worker_options worker_options_of(const training& run, std::size_t sender, std::uint64_t steps_done) {
  return {.plan = plan_of(run, steps_done), .compression = compression_of(run, sender)};
}

void check_training(const training& run, bool is_worker) {
  const lab::options& options = run.options;
  const auto refuse_if = [](bool bad, const std::string& why) {
    if (bad) throw std::invalid_argument(why);
  };
  refuse_if(!needs_server(options) && options.mode == "async",
            "--mode async needs a server: not --topology " + options.topology);
  refuse_if(run.is_plain() && options.runs != "without",
            "--topology mpi_allreduce has no layer dropping: it needs --runs without");
  if (run.is_plain() || options.runs == "all") {
    const std::string what = run.is_plain() ? "--topology mpi_allreduce" : "--runs all";
    refuse_if(options.transport != "mpi", what + " needs --transport mpi");
    refuse_if(options.checkpoint_period_steps > 0 || options.resume, what + " makes no checkpoints");
  }
  refuse_if(options.topology == "allreduce" && options.selection != "agreed",
            "--topology allreduce needs --selection agreed: all must send the same layers");
  refuse_if(options.overlap != "none" && options.payload != "as_is",
            "--overlap " + options.overlap + " adds numbers up on the way: it needs --payload as_is");
  refuse_if(options.workers_per_node && options.topology != "hybrid",
            "--workers-per-node needs --topology hybrid");
  refuse_if(options.degraded && (options.topology != "ps" || options.mode == "async"),
            "--degraded needs a server that waits for every worker: --mode sync and --topology ps");
  refuse_if(options.mode == "async" && options.selection == "agreed",
            "--selection agreed needs workers in step: --mode sync");
  refuse_if(options.staleness_steps && options.mode != "async",
            "--staleness needs --mode async: with --mode sync no worker is ahead");
  refuse_if(options.degraded && compares(options),
            "--degraded needs --runs with or without: who is lost in one run is missing in the other");
  refuse_if(!options.save.empty() && compares(options),
            "--save needs --runs with or without: it keeps one model");
  refuse_if(!options.load.empty() && options.resume,
            "--load begins a run, --resume goes on with one: give one");
  refuse_if(options.small_stem && options.network != "resnet50",
            "--small-stem needs --network resnet50, not --network " + options.network);
  refuse_if(options.network == "vgg16" && run.data.train->image_size_pixels() < vgg16_least_pixels,
            fmt::format("--network vgg16 needs images of at least {} pixels a side, not {}",
                        vgg16_least_pixels, run.data.train->image_size_pixels()));
  refuse_if(
      options.classes > 0 && options.classes < run.data.train->classes(),
      fmt::format("--classes {} are too few: the data has {}", options.classes, run.data.train->classes()));
  refuse_if(options.device == "cuda" && is_worker && !torch::cuda::is_available(),
            "--device cuda: this libtorch finds no CUDA device; use --device cpu");
  refuse_if(options.changes_exchange && options.topology == "hybrid",
            "--change-exchange needs workers that keep their own residuals: not --topology hybrid");
  refuse_if(options.changes_exchange && options.merge_residuals,
            "--change-exchange needs the same workers: not --merge-residuals");
  refuse_if(options.changes_exchange && options.updates == "local",
            "--change-exchange needs --updates gradients, not --updates local");
  refuse_if(options.merge_residuals && options.topology == "hybrid",
            "--merge-residuals needs workers that keep their own: not --topology hybrid");
  if (may_lose(options)) {
    const std::string what = options.loss_bound > 0        ? "--loss-bound"
                             : options.loss_bound_down > 0 ? "--loss-bound-down"
                                                           : "--inject-loss";
    refuse_if(options.transport == "mpi",
              what + " needs --transport inprocess or udp: over MPI nothing can be lost");
    refuse_if(options.degraded && options.transport == "inprocess",
              what + " needs workers that all stay in one process: not --degraded");
  }
  refuse_if(options.loss_bound_down > 0 && options.topology == "hybrid",
            "--loss-bound-down needs workers that hear the server themselves: not --topology hybrid");
  refuse_if(
      options.loss_bound_down > 0 && !needs_server(options),
      "--loss-bound-down needs a server: a sum that only some have would part the replicas of --topology " +
          options.topology);
  const lab::options usual;
  for (const auto& [is_given, name] : {
           std::pair(!options.interfaces.empty(), "--interface"),
           std::pair(options.link_rate_bits > 0, "--link-rate"),
           std::pair(options.mtu != usual.mtu, "--mtu"),
       }) {
    refuse_if(is_given && options.transport != "udp", name + std::string(" needs --transport udp"));
  }
  const bool has_bound = options.loss_bound > 0 || options.loss_bound_down > 0;
  for (const auto& [is_given, name] : {
           std::pair(options.loss_bound_warm_up_steps > 0, "--loss-bound-warm-up"),
           std::pair(options.stop != usual.stop, "--stop"),
           std::pair(options.loss_tags != usual.loss_tags, "--loss-tags"),
       }) {
    refuse_if(is_given && !has_bound,
              name + std::string(" needs a bound: --loss-bound or --loss-bound-down"));
  }
  refuse_if(options.on_loss != usual.on_loss && options.loss_bound == 0, "--on-loss needs --loss-bound");
  refuse_if(options.max_losses != usual.max_losses && (options.loss_bound == 0 || options.on_loss == "zero"),
            "--max-losses needs --loss-bound, and --on-loss return");
  if (run.options.mode == "async" && (run.options.checkpoint_period_steps > 0 || run.options.resume)) {
    throw std::invalid_argument("checkpoints need --mode sync: an asynchronous run is in no one state");
  }
  check_overlap(run);
  const server_options server = server_options_of(run, 0);
  training dropping = run;
  dropping.layer_dropping = options.runs != "without";
  lamina::gradient_compressor<float>(lamina::layout({{"any", {1}}}), compression_of(dropping, 0));
  sgd(lamina::layout({{"any", {1}}}), server.optimizer);
  lamina::outer_step<float>(lamina::layout({{"any", {1}}}), local_options_of(dropping).outer);
  lamina::partition(lamina::layout({{"any", {1}}}), run.options.part_elements);
  const std::size_t test_images = run.data.test->size().value();
  if (test_images < run.topology.workers()) {
    throw std::invalid_argument(
        fmt::format("{} test images are too few for {} workers", test_images, run.topology.workers()));
  }
  batch_stream(run.data.train, {run.topology.workers(), 0}, run.options.batch_images, run.options.seed);
}

void check_output(const training& run) {
  training other = run;
  other.layer_dropping = !run.layer_dropping;
  const bool is_there = has_checkpoints(run) || (compares(run.options) && has_checkpoints(other));
  if (run.options.resume && !is_there) {
    throw std::invalid_argument("there is no checkpoint to resume from in " + run.options.output);
  }
  if (!run.options.resume && !run.options.output.empty() && is_there) {
    throw std::invalid_argument(
        run.options.output +
        " holds checkpoints of an earlier run: go on from them with --resume, or give another "
        "--output");
  }
}

}  // namespace lab
