// SPDX-License-Identifier: MIT
// Sums beside the computation change nothing: runs of a small network over MPI against those that sum after the backward pass, bit
// for bit.
#define CATCH_CONFIG_RUNNER
#include "overlapped_runs.hpp"

#include <thread>

namespace {

using namespace overlapped_runs;

std::string text_of(const overlap_options& overlap) {
  return std::string(overlap.reaches_forward ? "step" : "backward") +
         (overlap.has_owners ? ", owners" : ", sums") + ", buckets of " +
         (overlap.plan.bucket_bytes ? std::to_string(*overlap.plan.bucket_bytes) : "what the costs say");
}

std::vector<overlap_options> all_overlaps() {
  std::vector<overlap_options> all;
  for (const bool reaches_forward : {false, true}) {
    for (const bool has_owners : {false, true}) {
      for (const std::size_t bucket_bytes : {0, 1024}) {
        overlap_options each;
        each.reaches_forward = reaches_forward;
        each.has_owners = has_owners;
        each.plan.bucket_bytes = bucket_bytes;
        each.plan.chunk_bytes = 8192;
        all.push_back(each);
      }
    }
  }
  return all;
}

}  // namespace

TEST_CASE("overlap: everything sent, a run is that of sums after the backward pass, bit for bit") {
  settings given;
  given.by = loop::allreduce;
  const diary expected = train(given);
  require_equal_replicas(expected);
  REQUIRE(expected.parameters.front() != expected.parameters.back());
  given.by = loop::overlapped;
  for (const overlap_options& overlap : all_overlaps()) {
    INFO(text_of(overlap));
    given.overlap = overlap;
    // Whoever moves messages on.
    if (overlap.reaches_forward && overlap.has_owners && overlap.plan.bucket_bytes == 0U)
      given.overlap.progress = collectives::progress_by::caller;
    const diary found = train(given);
    require_equal_runs(found, expected);
    require_equal_replicas(found);
  }
}

TEST_CASE("overlap: chosen a step ahead, a run is that of the same choice without overlap, bit for bit") {
  settings given;
  given.compression.drop_ratio = 0.7;
  given.compression.part_elements = 4096;
  given.compression.decide = lamina::decision_timing::ahead;
  given.by = loop::allreduce;
  const diary expected = train(given);
  require_equal_replicas(expected);
  // Some are held back in some steps, and none in the first.
  std::size_t arrived = 0;
  for (const step_metrics& each : expected.metrics) arrived += each.arrived.size();
  const std::size_t parts = expected.metrics.front().arrived.size();
  if (rank_of_this() == 0) REQUIRE(arrived < steps * parts);
  given.by = loop::overlapped;
  for (const overlap_options& overlap : all_overlaps()) {
    INFO(text_of(overlap));
    given.overlap = overlap;
    require_equal_runs(train(given), expected);
  }
}

TEST_CASE("overlap: a run in one process is that over MPI, bit for bit") {
  settings given;
  for (const overlap_options& overlap : all_overlaps()) {
    if (overlap.plan.bucket_bytes == 0U) continue;
    for (const bool drops : {false, true}) {
      INFO(text_of(overlap) << (drops ? ", chosen ahead" : ""));
      given.overlap = overlap;
      given.compression = {.drop_ratio = 0};
      if (drops)
        given.compression = {
            .drop_ratio = 0.9, .decide = lamina::decision_timing::ahead, .part_elements = 4096};
      const diary over_mpi = train(given);
      given.overlap.progress = collectives::progress_by::caller;
      const std::vector<diary> found = train_in_process(given);
      require_equal_runs(found[static_cast<std::size_t>(rank_of_this())], over_mpi);
    }
  }
}

TEST_CASE("overlap: in one process the exception of one ends all and comes out") {
  settings given;
  given.overlap.progress = collectives::progress_by::caller;
  std::size_t passes = 0;
  before_last_gradient = [&] {
    if (++passes == 3 * ranks()) throw std::domain_error("diverged");
  };
  REQUIRE_THROWS_WITH(train_in_process(given), Catch::Contains("diverged"));
  before_last_gradient = {};
}

TEST_CASE("overlap: plain MPI_Allreduce trains the same, but for the order of its sums") {
  settings given;
  given.by = loop::plain;
  const diary plain = train(given);
  given.by = loop::overlapped;
  const diary found = train(given);
  // Of two numbers there is one sum.
  if (ranks() <= 2) {
    REQUIRE(same_bits(found.at_end, plain.at_end));
    return;
  }
  for (std::size_t i = 0; i < found.at_end.size(); ++i)
    REQUIRE(found.at_end[i] == Approx(plain.at_end[i]).epsilon(1e-3).margin(1e-3));
}

TEST_CASE("overlap: every algorithm leaves the same replicas on all workers") {
  for (const collectives::algorithm each : collectives::all_algorithms) {
    settings given;
    given.overlap.reaches_forward = true;
    given.overlap.plan.choice = collectives::algorithm_choice::always(each);
    INFO(collectives::name_of(each));
    require_equal_replicas(train(given));
  }
}

TEST_CASE("overlap: sums in 16 bits leave the same replicas, and half of what they send") {
  settings given;
  const diary exact = train(given);
  const auto sent = [](const diary& run) {
    return run.metrics.back().sent_up + run.metrics.back().sent_down;
  };
  for (const bool has_owners : {false, true}) {
    overlap_options overlap;
    overlap.reaches_forward = overlap.has_owners = has_owners;
    INFO(text_of(overlap));
    overlap.plan.payload = lamina::payload_type::bfloat16;
    given.overlap = overlap;
    const diary found = train(given);
    require_equal_replicas(found);
    // Parameters that owners hand round are not rounded.
    if (rank_of_this() == 0 && ranks() > 1) REQUIRE(sent(found) < (has_owners ? 0.8 : 0.55) * sent(exact));
    // One worker sends nothing and rounds nothing.
    REQUIRE(same_bits(found.parameters.front(), exact.parameters.front()) == (ranks() == 1));
    for (std::size_t i = 0; i < found.at_end.size(); ++i)
      REQUIRE(found.at_end[i] == Approx(exact.at_end[i]).epsilon(0.1).margin(0.05));
  }
}

// Everything is sent: in the first step the residual is empty, and from then on it has what sums have rounded away.
TEST_CASE("overlap: what is rounded away stays in the residual where layers are chosen ahead") {
  if (ranks() == 1) return;
  settings given;
  given.overlap.plan.payload = lamina::payload_type::bfloat16;
  const diary lost = train(given);
  given.compression.decide = lamina::decision_timing::ahead;
  const diary forgotten = train(given);  // the compressor is not told
  given.compression.payload = lamina::payload_type::bfloat16;
  const diary kept = train(given);
  require_equal_replicas(kept);
  REQUIRE(same_bits(forgotten.at_end, lost.at_end));
  REQUIRE(same_bits(kept.parameters.front(), lost.parameters.front()));
  REQUIRE_FALSE(same_bits(kept.at_end, lost.at_end));
}

TEST_CASE("overlap: a step says what it waited for, and how many sums there were") {
  settings given;
  given.overlap.plan.bucket_bytes = 0;
  const diary each_layer = train(given);
  const std::size_t layers = 8;
  for (const step_metrics& step : each_layer.metrics) {
    REQUIRE(step.overlap.has_value());
    REQUIRE(step.overlap->exposed_seconds >= 0);
    REQUIRE(step.overlap->hidden_seconds >= 0);
    REQUIRE(step.overlap->predicted_exposed_seconds.has_value());
    REQUIRE(step.overlap->collectives == layers + (step.step == 1 ? 1 : 0));  // and that in which all meet
    // All of what is summed, but for the own slice, twice; and headers.
    const double least = 2.0 * static_cast<double>(ranks() - 1) / static_cast<double>(ranks());
    if (rank_of_this() == 0) REQUIRE(step.sent_up + step.sent_down >= least * 0.999);
  }
  given.overlap.reaches_forward = true;
  for (const step_metrics& step : train(given).metrics)
    REQUIRE(step.overlap->predicted_exposed_seconds.value_or(-1) >= 0);
  given.compression.decide = lamina::decision_timing::ahead;  // what is sent differs from step to step
  for (const step_metrics& step : train(given).metrics)
    REQUIRE(!step.overlap->predicted_exposed_seconds.has_value());
}

TEST_CASE("overlap: the sums of later layers end while the first still waits for its gradient") {
  if (ranks() < 2) return;
  // The backward pass of the first layer begins when the sum of the last has ended, which it cannot without overlap.
  for (const bool has_owners : {false, true}) {
    collectives::timeline events(10000);
    settings given;
    given.overlap.plan.bucket_bytes = 0;
    given.overlap.has_owners = has_owners;
    given.overlap.record = &events;
    std::uint64_t step = 0;
    before_last_gradient = [&] {
      if (++step == 1) return;  // in which the order is recorded
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      const auto has_ended = [&] {
        for (const collectives::event& each : events.events()) {
          if (each.what == collectives::activity::collective && each.kind == collectives::event_kind::end &&
              each.step == step)
            return true;
        }
        return false;
      };
      while (!has_ended()) {
        if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("no sum ends in backward");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    const diary found = train(given);
    before_last_gradient = {};
    REQUIRE(step == steps);
    REQUIRE(found.parameters.size() == steps);
  }
}

int main(int argc, char** argv) {
  const mpi_session session(argc, argv, MPI_THREAD_MULTIPLE);
  torch::set_num_threads(1);
  const int failures = Catch::Session().run(argc, argv);
  // One rank that fails must not leave the others waiting for the next test case.
  if (failures != 0) MPI_Abort(MPI_COMM_WORLD, 1);
  return 0;
}
