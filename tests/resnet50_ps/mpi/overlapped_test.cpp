// SPDX-License-Identifier: MIT
// Sums beside the computation change nothing: runs of a small network over MPI against those that sum after the backward pass, bit
// for bit. Every rank passes through the same test cases in the same order and asserts of its own replica.
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/utils.h>

#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <lamina/collectives/mpi_channel.hpp>
#include <lamina/collectives/torch_hooks.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "launch/topology.hpp"
#include "loops/allreduce.hpp"
#include "loops/dense_allreduce.hpp"
#include "loops/overlapped.hpp"
#include "messages/mpi_transport.hpp"
#include "messages/worker_group.hpp"
#include "model/batch_norm.hpp"
#include "model/passes.hpp"
#include "model/replica.hpp"

#define CATCH_CONFIG_RUNNER
#include "catch.hpp"
#include "world.hpp"

namespace {

using namespace resnet50_ps;
namespace collectives = lamina::collectives;
using collectives::gated;

constexpr std::uint64_t steps = 25;
constexpr std::int64_t classes = 5;
const collectives::gate open_gate;

// Called in the backward pass of the first layer, when the gradients of all others are complete; may be empty.
std::function<void()> before_last_gradient;

// A convolution, a normalisation, a layer larger than a part, and one with fewer elements than there are ranks.
struct network_impl : torch::nn::Module {
  network_impl()
      : conv(register_module(
            "conv", gated<torch::nn::Conv2dImpl>(open_gate, torch::nn::Conv2dOptions(3, 8, 3).bias(false)))),
        norm(register_module("norm", gated<batch_norm_impl>(open_gate, 8))),
        hidden(register_module("hidden", gated<torch::nn::LinearImpl>(open_gate, 128, 64))),
        output(register_module("output", gated<torch::nn::LinearImpl>(open_gate, 64, classes))),
        scale(register_module(
            "scale", gated<torch::nn::LinearImpl>(open_gate, torch::nn::LinearOptions(1, 1).bias(false)))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor first = conv(x);
    if (first.requires_grad()) {
      first.register_hook([](const torch::Tensor& gradient) {
        if (before_last_gradient) before_last_gradient();
        return gradient;
      });
    }
    const torch::Tensor features = torch::relu(norm(first)).flatten(1);
    const torch::Tensor logits = output(torch::relu(hidden(features)));
    return scale(logits.reshape({-1, 1})).reshape(logits.sizes());
  }
  gated<torch::nn::Conv2dImpl> conv;
  gated<batch_norm_impl> norm;
  gated<torch::nn::LinearImpl> hidden, output, scale;
};
TORCH_MODULE_IMPL(network, network_impl);

enum class loop { allreduce, plain, overlapped };

struct settings {
  lamina::compressor_options compression = {.drop_ratio = 0};
  sgd_options optimizer = {.learning_rate = 0.05F, .momentum = 0.9F, .weight_decay = 0.01F, .nesterov = true};
  loop by = loop::overlapped;
  overlap_options overlap = {};
  std::uint64_t evaluation_period_steps = 7;
  std::uint64_t checkpoint_period_steps = 0;
  std::uint64_t steps_done = 0;
  server_state from = {};              // of worker 0
  std::vector<float> parameters = {};  // likewise
};

struct diary {
  std::vector<std::vector<float>> parameters;  // after each step
  std::vector<float> at_end;
  std::vector<step_metrics> metrics;  // of worker 0
  std::map<std::uint64_t, evaluation> evaluations;
  std::vector<server_state> saved;
};

std::vector<float> parameters_of(const replica& local) {
  std::vector<float> flat;
  for (std::size_t l = 0; l < local.model().layers(); ++l)
    flat.insert(flat.end(), local[l].begin(), local[l].end());
  return flat;
}

// A digest of the parameters, as an evaluation: of parameters that are not whole it is another.
std::uint64_t digest_of(const replica& local) {
  return hash_of(local) >> 1U;
}

diary train(const settings& given) {
  const topology who = allreduce_topology(ranks());
  mpi_transport transport(MPI_COMM_WORLD, {.max_message_bytes = 1 << 22,
                                           .timeout_of = [](std::size_t) { return std::chrono::seconds(60); },
                                           .exchange_timeout = std::chrono::seconds(60),
                                           .name_of = [&](std::size_t rank) { return who.name_of(rank); }});
  worker_group group(transport);
  torch::manual_seed(100 +
                     static_cast<std::uint64_t>(group.worker()));  // those of worker 0 replace the others
  replica local{torch::nn::AnyModule(network()), given.compression.part_elements};
  const auto random =
      std::make_shared<at::Generator>(at::make_generator<at::CPUGeneratorImpl>(7 + group.worker()));
  diary seen;
  const worker_tasks tasks = {
      .compute =
          [&](std::uint64_t, step_report& report) {
            const torch::Tensor images = torch::randn({4, 3, 6, 6}, *random);
            compute_gradients(local, {images, images.flatten(1).slice(1, 0, classes).argmax(1)}, report);
          },
      .evaluate =
          [&](step_report& report) {
            report.test_images = 1;
            report.test_top1 = digest_of(local);
          },
      .save =
          [&] {
            const torch::Tensor state = random->get_state();
            const auto* bytes = static_cast<const std::byte*>(state.data_ptr());
            return std::vector<std::byte>(bytes, bytes + state.nbytes());
          },
      .load =
          [&](std::span<const std::byte> bytes) {
            torch::Tensor state = torch::empty({static_cast<std::int64_t>(bytes.size())}, torch::kByte);
            std::memcpy(state.data_ptr(), bytes.data(), bytes.size());
            random->set_state(state);
          },
  };
  const server_tasks records = {
      .records = {.record =
                      [&](const step_metrics& step) {
                        seen.parameters.push_back(parameters_of(local));
                        seen.metrics.push_back(step);
                      },
                  .record_evaluation = [&](std::uint64_t step,
                                           const evaluation& whole) { seen.evaluations[step] = whole; }},
      .updated = {},
      .save = [&](const server_state& state) { seen.saved.push_back(state); }};
  training_plan plan = {.steps = steps,
                        .steps_done = given.steps_done,
                        .agrees_on_selection = true,
                        .evaluation_period_steps = given.evaluation_period_steps,
                        .hash_period_steps = 10,
                        .checkpoint_period_steps = given.checkpoint_period_steps};
  const worker_options worker = {.plan = plan, .compression = given.compression};
  const server_options server = {
      .plan = plan,
      .optimizer = given.optimizer,
      .learning_rate = learning_rate_schedule(given.optimizer.learning_rate, {}, 4)};
  const float* parameter = given.parameters.data();
  for (std::size_t l = 0; l < local.model().layers() && !given.parameters.empty();
       parameter += local[l++].size())
    std::copy_n(parameter, local[l].size(), local[l].begin());
  switch (given.by) {
    case loop::allreduce:
      train_by_allreduce(group, local, tasks, worker, server, records, given.from);
      break;
    case loop::plain:
      train_by_mpi_allreduce(group, MPI_COMM_WORLD, local, tasks, worker, server, records);
      break;
    case loop::overlapped: {
      collectives::mpi_channel channel(MPI_COMM_WORLD);
      train_overlapped(group, channel, local, tasks, worker, server, given.overlap, records, given.from);
    }
  }
  seen.at_end = parameters_of(local);
  return seen;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void require_equal_runs(const diary& a, const diary& b) {
  REQUIRE(a.parameters.size() == steps);
  REQUIRE(b.parameters.size() == steps);
  for (std::size_t step = 0; step < steps; ++step) {
    INFO("after step " << step + 1);
    REQUIRE(same_bits(a.parameters[step], b.parameters[step]));
    REQUIRE(a.metrics[step].learning_rate == b.metrics[step].learning_rate);
    if (rank_of_this() != 0) continue;  // who hears the reports of all
    REQUIRE(a.metrics[step].loss == b.metrics[step].loss);
    REQUIRE(a.metrics[step].arrived == b.metrics[step].arrived);
    REQUIRE(a.metrics[step].threshold == b.metrics[step].threshold);
  }
  REQUIRE(same_bits(a.at_end, b.at_end));
  REQUIRE(a.evaluations.size() == b.evaluations.size());
  for (const auto& [step, evaluated] : a.evaluations) REQUIRE(evaluated.top1 == b.evaluations.at(step).top1);
}

// Every worker's replica is that of worker 0.
void require_equal_replicas(const diary& run) {
  for (const std::vector<float>& own : run.parameters) {
    std::vector<float> first = own;
    check_mpi(MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD),
              "MPI_Bcast");
    REQUIRE(same_bits(own, first));
  }
}

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

TEST_CASE("overlap: a checkpoint after any step holds what one holds of sums after the backward pass") {
  settings given;
  given.compression.drop_ratio = 0.7;
  given.compression.decide = lamina::decision_timing::ahead;
  given.checkpoint_period_steps = 6;
  given.by = loop::allreduce;
  const diary expected = train(given);
  given.by = loop::overlapped;
  for (const bool reaches_forward : {false, true}) {
    given.overlap.reaches_forward = reaches_forward;
    const diary found = train(given);
    REQUIRE(found.saved.size() == expected.saved.size());
    for (std::size_t i = 0; i < found.saved.size(); ++i) {
      REQUIRE(found.saved[i].step == expected.saved[i].step);
      const bool has_equal_states = found.saved[i].optimizer == expected.saved[i].optimizer &&
                                    found.saved[i].workers == expected.saved[i].workers;
      REQUIRE(has_equal_states);
    }
    // And a run that goes on from one of them is the one that was not interrupted.
    constexpr std::uint64_t steps_done = 12;
    settings resumed = given;
    resumed.steps_done = steps_done;
    if (rank_of_this() == 0) {
      resumed.from = found.saved[1];
      resumed.parameters = found.parameters[steps_done - 1];
    }
    const diary rest = train(resumed);
    REQUIRE(rest.parameters.size() == steps - steps_done);
    for (std::size_t i = 0; i < rest.parameters.size(); ++i)
      REQUIRE(same_bits(rest.parameters[i], found.parameters[steps_done + i]));
  }
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
