// SPDX-License-Identifier: MIT
#include "launch/handshake.hpp"

#include <fmt/format.h>

#include <cstring>
#include <lamina/version.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "launch/udp_ranks.hpp"
#include "messages/link.hpp"
#include "state/saved_run.hpp"

namespace lab {
namespace {

constexpr std::size_t rank_0 = 0;

std::string introduction(const training& run, const lamina::layout& model) {
  const lab::options& options = run.options;
  return fmt::format(
      "lamina {}.{}.{}; {} of runs {}; {}; steps {}; evaluations every {}; checkpoints every {}; {}{}{}; {}",
      LAMINA_VERSION_MAJOR, LAMINA_VERSION_MINOR, LAMINA_VERSION_PATCH, run.name(), options.runs,
      workers_of(run.topology), options.steps, options.evaluation_period_steps,
      options.checkpoint_period_steps,
      (options.degraded ? "degraded; " : std::string()) + (options.no_evaluation ? "not evaluated; " : "") +
          (options.save.empty() ? "" : "saved; ") +
          (options.staleness_steps ? fmt::format("staleness {}; ", *options.staleness_steps) : "") +
          (options.plan.empty() ? "" : "by a plan; ") +
          (options.load.empty() ? "" : "from " + options.load + "; ") + describe_udp(options),
      options.experiment, configuration_of(run, model), exchange_of(run));
}

}  // namespace

std::uint64_t shake_hands(transport& ranks, const training& run, const lamina::layout& model,
                          std::uint64_t steps_done) {
  const std::string mine = introduction(run, model);
  if (ranks.rank() > 0) {
    ranks.send({&rank_0, 1}, message_kind::introduction, payload(std::as_bytes(std::span(mine))));
    const message answered = ranks.receive_from_each({&rank_0, 1})[0];
    expect(answered, message_kind::welcome, run.topology.name_of(rank_0));
    if (answered.bytes.size() != sizeof steps_done)
      throw link_error("rank 0 gave no answer to an introduction");
    std::memcpy(&steps_done, answered.bytes.data(), sizeof steps_done);
    return steps_done;
  }
  std::vector<std::size_t> others(ranks.ranks() - 1);
  std::iota(others.begin(), others.end(), std::size_t{1});
  for (const message& each : ranks.receive_from_each(others)) {
    expect(each, message_kind::introduction, run.topology.name_of(others[each.sender]));
    const std::string theirs(reinterpret_cast<const char*>(each.bytes.data()), each.bytes.size());
    if (theirs == mine) continue;
    throw link_error(fmt::format("{} was started for another run than {}\n  here:  {}\n  there: {}",
                                 run.topology.name_of(others[each.sender]), run.topology.name_of(0), mine,
                                 theirs));
  }
  ranks.send(others, message_kind::welcome, payload(std::as_bytes(std::span(&steps_done, 1))));
  return steps_done;
}

}  // namespace lab
