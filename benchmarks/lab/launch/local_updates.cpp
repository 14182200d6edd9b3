// SPDX-License-Identifier: MIT
#include "launch/local_updates.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <utility>

#include "launch/numbers.hpp"

namespace lab {
namespace {

constexpr std::uint64_t longest_delay_steps = 64;

// Of options that mean nothing without local updates, the first that is given.
std::string needing_local_updates(const options& given) {
  const options usual;
  if (given.delay_steps != usual.delay_steps) return "--delay";
  if (given.outer_rate != usual.outer_rate) return "--outer-rate";
  if (given.outer_momentum != usual.outer_momentum) return "--outer-momentum";
  if (given.down_payload != usual.down_payload) return "--down-payload";
  return "";
}

}  // namespace

void add_local_update_options(CLI::App& app, options& into) {
  const std::string group = "Local updates, with --topology ps or allreduce";
  app.add_option("--updates", into.updates,
                 "gradients: the server makes the step; local: each worker goes on with its own at once, and "
                 "what it did that the others have not seen is held back or sent in place of gradients")
      ->check(CLI::IsMember({"gradients", "local"}))
      ->group(group);
  app.add_option("--delay", into.delay_steps,
                 "steps after which what came together is applied; with 1 it is on its way while the next "
                 "step is computed")
      ->check(counted)
      ->check(CLI::Range(std::uint64_t{0}, longest_delay_steps))
      ->group(group);
  app.add_option("--outer-rate", into.outer_rate, "of the mean of the workers' updates that all apply")
      ->check(finite)
      ->group(group);
  app.add_option("--outer-momentum", into.outer_momentum, "of these means, Nesterov's; 0: none")
      ->check(finite)
      ->group(group);
  app.add_option("--down-payload", into.down_payload,
                 "how what all apply is written, from who has added it up")
      ->check(CLI::IsMember({"as_is", "float16", "bfloat16", "int8", "int4"}))
      ->group(group);
}

std::string mistake_in_local_updates(const options& given) {
  if (given.updates == "gradients") {
    const std::string stray = needing_local_updates(given);
    return stray.empty() ? "" : stray + " needs --updates local";
  }
  const std::string local = "--updates local";
  if (given.topology != "ps" && given.topology != "allreduce")
    return local + " needs --topology ps or allreduce, not --topology " + given.topology;
  if (given.mode != "sync") return local + " needs --mode sync";
  if (given.degraded) return local + " needs workers that all stay: not --degraded";
  if (given.residual_momentum > 0)
    return local +
           ": a drift has no momentum of its own; use --momentum, of the workers' SGD, in place of "
           "--residual-momentum";
  if (given.decide != "at_end")
    return local + " needs --decide at_end: a drift is complete at the end of a step";
  if (given.overlap != "none")
    return local + " needs --overlap none; --delay 1 hides what is sent behind the next step";
  if (given.loss_bound_down > 0) return local + " needs all to apply the same: not --loss-bound-down";
  if (given.merge_residuals)
    return local + " goes on with as many workers as there were: not --merge-residuals";
  return "";
}

std::string describe_local_updates(const options& given) {
  if (given.updates == "gradients") return "";
  return fmt::format("; local updates, delay {}, outer rate {}, momentum {}, down payload {}",
                     given.delay_steps, given.outer_rate, given.outer_momentum, given.down_payload);
}

local_options local_options_of(const training& run) {
  return {.delay_steps = run.options.delay_steps,
          .outer = {.rate = run.options.outer_rate,
                    .momentum = run.options.outer_momentum,
                    .payload = payload_named(run.options.down_payload)}};
}

lamina::payload_type payload_named(const std::string& name) {
  static const std::map<std::string, lamina::payload_type> payloads = {
      {"as_is", lamina::payload_type::as_is},       {"float16", lamina::payload_type::float16},
      {"bfloat16", lamina::payload_type::bfloat16}, {"int8", lamina::payload_type::int8},
      {"int4", lamina::payload_type::int4},
  };
  return payloads.at(name);
}

}  // namespace lab
