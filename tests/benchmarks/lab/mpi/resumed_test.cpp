// SPDX-License-Identifier: MIT
// What a checkpoint holds of sums beside the computation: the state of a run that sums after the backward pass, and the plan.
#include "overlapped_runs.hpp"

namespace {

using namespace overlapped_runs;

constexpr std::uint64_t saved_after = 12;

// What goes on after one of a run's checkpoints.
diary resumed(settings given, const diary& run, const server_state& from) {
  given.steps_done = saved_after;
  if (rank_of_this() == 0) {
    given.from = from;
    given.parameters = run.parameters[saved_after - 1];
  }
  return train(given);
}

void require_goes_on(const diary& rest, const diary& whole) {
  REQUIRE(rest.parameters.size() == steps - saved_after);
  for (std::size_t i = 0; i < rest.parameters.size(); ++i)
    REQUIRE(same_bits(rest.parameters[i], whole.parameters[saved_after + i]));
}

// Of worker 0, where there are any.
const server_state& state_in(const diary& run) {
  static const server_state none;
  return run.saved.empty() ? none : run.saved.at(1);
}

settings dropping_with_checkpoints() {
  settings given;
  given.compression.drop_ratio = 0.7;
  given.compression.part_elements = 4096;
  given.compression.decide = lamina::decision_timing::ahead;
  given.checkpoint_period_steps = 6;
  return given;
}

}  // namespace

TEST_CASE("overlap: a checkpoint after any step holds what one holds of sums after the backward pass") {
  settings given = dropping_with_checkpoints();
  given.by = loop::allreduce;
  const diary expected = train(given);
  given.by = loop::overlapped;
  for (const bool has_owners : {false, true}) {
    INFO((has_owners ? "owners" : "sums"));
    given.overlap.reaches_forward = true;
    given.overlap.has_owners = has_owners;
    // Of two numbers there is one sum, and by a ring the second worker owns what the first does else.
    const auto how = ranks() == 2 ? collectives::algorithm::ring : collectives::algorithm::pairwise;
    given.overlap.plan.choice = collectives::algorithm_choice::always(how);
    given.overlap.plan.bucket_bytes = 0;
    const diary found = train(given);
    REQUIRE(found.saved.size() == expected.saved.size());
    for (std::size_t i = 0; i < found.saved.size() && rank_of_this() == 0; ++i) {  // who keeps them
      REQUIRE(found.saved[i].step == expected.saved[i].step);
      const bool has_equal_states = found.saved[i].optimizer == expected.saved[i].optimizer &&
                                    found.saved[i].workers == expected.saved[i].workers;
      REQUIRE(has_equal_states);
      REQUIRE(found.saved[i].plan == found.saved.front().plan);
      REQUIRE(expected.saved[i].plan.empty());
    }
    // A run that goes on from one of them, or from one of the other kind, is the one that was not interrupted.
    // The first by the plan of its checkpoint, whatever the options would make.
    given.overlap.plan.bucket_bytes = 1 << 20;
    const diary rest = resumed(given, found, state_in(found));
    require_goes_on(rest, found);
    require_goes_on(resumed(given, expected, state_in(expected)), expected);
    settings other = given;
    other.by = loop::allreduce;
    require_goes_on(resumed(other, found, state_in(found)), expected);
    if (rank_of_this() == 0) REQUIRE(rest.saved.back().plan == found.saved.front().plan);
  }
}

TEST_CASE("overlap: what is planned is told, and another run goes by it") {
  settings given;
  std::string told;
  given.overlap.has_owners = true;
  given.overlap.plan.bucket_bytes = 0;
  given.overlap.planned = [&](const collectives::plan& made) { told = made.save(); };
  const diary first = train(given);
  REQUIRE(told.empty() == (rank_of_this() != 0));  // worker 0 alone

  settings by_plan = given;
  by_plan.overlap.plan.bucket_bytes = 1 << 20;  // of which a run by a plan takes no notice
  by_plan.overlap.earlier_plan = told;
  const diary second = train(by_plan);
  require_equal_runs(second, first);
  if (rank_of_this() == 0)
    REQUIRE(second.metrics[3].overlap->collectives == first.metrics[3].overlap->collectives);
}

TEST_CASE("overlap: a plan of another model, of other workers, or damaged is refused by worker 0") {
  if (ranks() > 1) return;  // who says so ends the others
  settings given;
  std::string told;
  given.overlap.planned = [&](const collectives::plan& made) { told = made.save(); };
  train(given);
  const auto refusal = [&](const std::string& text) {
    settings by_plan = given;
    by_plan.overlap.earlier_plan = text;
    by_plan.overlap.earlier_plan_is_from = "plan.txt";
    try {
      train(by_plan);
    } catch (const collectives::plan_error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  REQUIRE(refusal(told).empty());
  REQUIRE_THAT(refusal(told.substr(1)), Catch::Matchers::StartsWith("plan.txt: the plan is damaged"));
  const lamina::layout other({{"layer", {10}}});
  const std::vector<std::size_t> order = {0};
  const std::vector<collectives::layer_class> kind(1);
  REQUIRE_THAT(refusal(collectives::plan(other, 1, order, kind).save()),
               Catch::Matchers::StartsWith("plan.txt: the plan is of the model ") &&
                   Catch::Matchers::Contains(", this one is "));
  given.overlap.plan.payload = lamina::payload_type::bfloat16;
  REQUIRE(refusal(told) == "plan.txt: the plan sums as as_is, --sum-payload is bfloat16");
  given.overlap.plan.payload = lamina::payload_type::as_is;
  const collectives::plan made =
      collectives::plan::load(told, replica{torch::nn::AnyModule(network(true))}.model(), 1);
  std::vector<std::size_t> layers;
  for (const auto& each : made.buckets()) layers.insert(layers.end(), each.layers.begin(), each.layers.end());
  REQUIRE_THAT(
      refusal(collectives::plan(made.model(), 3, layers, std::vector<collectives::layer_class>(layers.size()))
                  .save()),
      Catch::Matchers::Contains("the plan is for 3 ranks, there are 1"));
}
