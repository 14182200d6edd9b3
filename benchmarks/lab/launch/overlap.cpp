// SPDX-License-Identifier: MIT
#include "launch/overlap.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <lamina/collectives/collectives.hpp>
#include <stdexcept>
#include <utility>
#include <vector>

#include "launch/numbers.hpp"

namespace lab {
namespace {

namespace collectives = lamina::collectives;

collectives::algorithm_choice choice_of(const options& given) {
  if (given.collectives == "by_type") return collectives::algorithm_choice::by_type();
  if (given.collectives == "by_cost") return collectives::algorithm_choice::by_cost();
  return collectives::algorithm_choice::always(collectives::parse_algorithm(given.collectives));
}

bool drops_layers(const options& given) {
  return given.runs != "without";
}

// Of options that mean nothing without --overlap, the first that is given.
std::string needing_overlap(const options& given) {
  if (given.exchange != "sums") return "--exchange " + given.exchange;
  if (given.collectives != "pairwise") return "--collectives " + given.collectives;
  if (given.bucket_bytes) return fmt::format("--bucket-bytes {}", *given.bucket_bytes);
  if (given.chunk_bytes) return fmt::format("--chunk-bytes {}", *given.chunk_bytes);
  if (given.sum_payload != "as_is") return "--sum-payload " + given.sum_payload;
  if (given.is_calibrated) return "--calibrate";
  if (given.progress_by != "thread") return "--progress-by " + given.progress_by;
  if (!given.plan.empty()) return "--plan";
  if (!given.timeline.empty()) return "--timeline";
  return "";
}

// Of options of sums among the workers, the first that is given.
std::string of_sums(const options& given) {
  if (given.exchange != "sums") return "--exchange " + given.exchange;
  if (given.collectives != "pairwise") return "--collectives " + given.collectives;
  if (given.chunk_bytes) return fmt::format("--chunk-bytes {}", *given.chunk_bytes);
  if (given.is_calibrated) return "--calibrate";
  if (!given.timeline.empty()) return "--timeline";
  return "";
}

// Layers are decided when their gradients are there, and a server takes them.
std::string mistake_in_as_ready(const options& given) {
  const std::string as_ready = "--decide as_ready";
  if (given.topology != "ps")
    return as_ready + " needs --topology ps, not --topology " + given.topology +
           ": each worker chooses for itself, and tells the server";
  if (given.mode != "sync") return as_ready + " needs --mode sync";
  if (given.selection != "local")
    return as_ready + " needs --selection local, not --selection " + given.selection +
           ": the values of the others are not known yet";
  if (given.degraded) return as_ready + ": not --degraded";
  if (given.device != "cpu")
    return as_ready + " needs --device cpu: gradients come to the CPU's memory after backward alone";
  if (given.transport == "udp") return as_ready + " needs --transport mpi or inprocess, not --transport udp";
  const std::string sums = given.overlap == "none" ? "" : of_sums(given);
  return sums.empty() ? ""
                      : sums + " needs --topology allreduce: a server makes the sums of --decide as_ready";
}

std::string mistake_in_owners(const options& given) {
  // What leaves a slice to each worker; halving_doubling does for some numbers of them.
  const std::vector<std::string> possible = {"pairwise", "ring", "halving_doubling"};
  if (std::ranges::find(possible, given.collectives) == possible.end()) {
    return "--exchange owners needs --collectives pairwise, ring or halving_doubling, not --collectives " +
           given.collectives + ": each worker must end with a slice";
  }
  return "";
}

std::string mistake_in_plan(const options& given) {
  if (given.plan.empty()) return "";
  if (given.resume && !given.changes_exchange)
    return "--plan begins a run, --resume goes on by the plan of its checkpoint: give one";
  for (const auto& [is_given, option] : {std::pair(given.bucket_bytes.has_value(), "--bucket-bytes"),
                                         std::pair(given.chunk_bytes.has_value(), "--chunk-bytes"),
                                         std::pair(given.is_calibrated, "--calibrate"),
                                         std::pair(given.collectives != "pairwise", "--collectives")}) {
    if (is_given) return std::string("--plan has what ") + option + " says: give one";
  }
  return "";
}

}  // namespace

void add_overlap_options(CLI::App& app, options& into) {
  const std::string group =
      "Sums beside the computation, with --topology allreduce, or ps and --decide as_ready";
  app.add_option("--overlap", into.overlap,
                 "when gradients are summed. none: after the backward pass; backward: beside it; step: also "
                 "during the next forward pass, where a layer is waited for when it is needed")
      ->check(CLI::IsMember({"none", "backward", "step"}))
      ->group(group);
  app.add_option("--decide", into.decide,
                 "when the layers of a step are chosen. at_end: after the backward pass; ahead: in the step "
                 "before, so that they can leave as soon as they are computed; as_ready: each when it is "
                 "computed, by the threshold of the step before, with --topology ps")
      ->check(CLI::IsMember({"at_end", "ahead", "as_ready"}))
      ->group(group);
  app.add_option("--exchange", into.exchange,
                 "sums: every worker updates everything; owners: each its slices of all layers, and hands "
                 "the parameters round")
      ->check(CLI::IsMember({"sums", "owners"}))
      ->group(group);
  app.add_option("--collectives", into.collectives,
                 "how a sum is made; by_type: a butterfly for convolutions, a ring for fully connected "
                 "layers; by_cost: the cheapest of all for its bytes")
      ->check(CLI::IsMember({"pairwise", "ring", "halving_doubling", "by_type", "by_cost"}))
      ->group(group);
  app.add_option(
         "--sum-payload", into.sum_payload,
         "as what gradients travel to be summed, and sums back. What rounding takes of a gradient is lost, "
         "but for --decide ahead, where it stays in the residual; what it takes of a sum is lost")
      ->check(CLI::IsMember({"as_is", "bfloat16"}))
      ->group(group);
  app.add_option("--bucket-bytes", into.bucket_bytes,
                 "layers are summed together until they have so many bytes; 0: each by itself; without it by "
                 "the costs of the network, or 1 MiB where parts go to a server")
      ->check(counted)
      ->group(group);
  app.add_option("--chunk-bytes", into.chunk_bytes,
                 "a larger bucket goes in several sums of so many bytes, at least 4096; without it 4 MiB")
      ->check(counted)
      ->group(group);
  app.add_flag("--calibrate", into.is_calibrated,
               "measure the network before the first step; without it its costs are those of 1 Gb/s")
      ->group(group);
  app.add_option(
         "--progress-by", into.progress_by,
         "who moves messages on. thread: one of their own; hooks: the thread that computes, whenever a "
         "gradient is complete or a layer is waited for, as always in one process")
      ->check(CLI::IsMember({"thread", "hooks"}))
      ->group(group);
  app.add_option(
         "--plan", into.plan,
         "plan.txt of an earlier run: order, buckets, algorithms, costs, and when parameters go round; "
         "read by worker 0")
      ->group(group);
  app.add_option("--timeline", into.timeline,
                 "file for what happened when in the last 20 steps, as Chrome trace JSON: one a worker, "
                 "whose number stands before the extension")
      ->group(group);
}

std::string mistake_in_overlap(const options& given) {
  const bool is_ahead = given.decide == "ahead";
  const bool is_as_ready = given.decide == "as_ready";
  if (is_as_ready) {
    if (std::string mistake = mistake_in_as_ready(given); !mistake.empty()) return mistake;
  }
  if (is_ahead && given.selection != "agreed")
    return "--decide ahead needs --selection agreed, not --selection " + given.selection +
           ": all must have chosen the same layers before the first leaves";
  if (is_ahead && given.topology != "allreduce")
    return "--decide ahead needs --topology allreduce, not --topology " + given.topology;
  if (given.overlap == "none") {
    const std::string stray = needing_overlap(given);
    return stray.empty() ? "" : stray + " needs --overlap backward or --overlap step";
  }
  if (is_as_ready) return "";
  const std::string overlap = "--overlap " + given.overlap;
  if (given.mode != "sync") return overlap + " needs --mode sync";
  if (given.topology == "ps")
    return overlap + " needs --decide as_ready with --topology ps, not --decide " + given.decide +
           ": else no layer is chosen before backward ends";
  if (given.topology != "allreduce")
    return overlap + " needs --topology allreduce or ps, not --topology " + given.topology;
  if (given.degraded) return overlap + ": not --degraded";
  if (given.device != "cpu")
    return overlap + " needs --device cpu: gradients come to the CPU's memory after backward alone";
  if (given.transport == "udp") return overlap + " needs --transport mpi: sums go as messages, not as frames";
  if (may_lose(given))
    return overlap + ": not --loss-bound or --inject-loss: sums go as messages, not as frames";
  if (given.transport == "inprocess" && given.is_calibrated)
    return "--calibrate needs --transport mpi: in one process there is no network to measure";
  if (drops_layers(given) && !is_ahead)
    return overlap + " sends nothing before backward ends when --decide at_end: use --decide ahead";
  if (given.sum_payload != "as_is" && given.collectives != "pairwise")
    return "--sum-payload " + given.sum_payload + " needs --collectives pairwise, not --collectives " +
           given.collectives + ", which would round on its way from worker to worker";
  if (given.chunk_bytes && *given.chunk_bytes < 4096)
    return fmt::format("--chunk-bytes {} is less than 4096", *given.chunk_bytes);
  if (std::string mistake = mistake_in_plan(given); !mistake.empty()) return mistake;
  return given.exchange == "owners" ? mistake_in_owners(given) : "";
}

void check_overlap(const training& run) {
  const options& given = run.options;
  const std::size_t workers = run.topology.workers();
  if (given.exchange == "owners" && given.collectives == "halving_doubling" &&
      !std::has_single_bit(workers)) {
    throw std::invalid_argument(fmt::format(
        "--exchange owners with --collectives halving_doubling needs a power of two of workers, not {}",
        workers));
  }
}

std::string describe_overlap(const options& given) {
  if (given.overlap == "none") return "";
  if (given.decide == "as_ready")
    return fmt::format("; overlap {}, parts of {} bytes", given.overlap,
                       streaming_options_of(given).part_bytes);
  const auto said = [](const auto& optional) { return optional ? fmt::format("{}", *optional) : "auto"; };
  return fmt::format("; overlap {}, exchange {}, collectives {}, sum payload {}, buckets {}, chunks {}{}",
                     given.overlap, given.exchange, given.collectives, given.sum_payload,
                     said(given.bucket_bytes), said(given.chunk_bytes),
                     given.is_calibrated ? ", calibrated" : "");
}

streaming_options streaming_options_of(const options& given) {
  streaming_options meant;
  meant.is_in_parts = given.overlap != "none";
  meant.reaches_forward = given.overlap == "step";
  if (given.bucket_bytes) meant.part_bytes = *given.bucket_bytes;
  return meant;
}

overlap_options overlap_options_of(const training& run) {
  const options& given = run.options;
  overlap_options meant;
  meant.reaches_forward = given.overlap == "step";
  meant.has_owners = given.exchange == "owners";
  // In one process workers take turns, and no thread runs beside them.
  if (given.progress_by == "hooks" || given.transport == "inprocess")
    meant.progress = collectives::progress_by::caller;
  meant.plan.bucket_bytes = given.bucket_bytes;
  if (given.chunk_bytes) meant.plan.chunk_bytes = *given.chunk_bytes;
  meant.plan.choice = choice_of(given);
  meant.plan.payload = collectives::parse_sum_payload(given.sum_payload);
  meant.is_calibrated = given.is_calibrated;
  meant.timeout = std::chrono::seconds(2 * given.timeout_seconds);
  return meant;
}

}  // namespace lab
