// SPDX-License-Identifier: MIT
#pragma once

// Runs of a small network over MPI, with sums beside the computation and without. Every rank passes through the same test cases in the
// same order and asserts of its own replica.
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/topology.hpp"
#include "loops/allreduce.hpp"
#include "loops/dense_allreduce.hpp"
#include "loops/overlapped.hpp"
#include "messages/in_process_transport.hpp"
#include "messages/mpi_transport.hpp"
#include "messages/worker_group.hpp"
#include "model/passes.hpp"
#include "model/replica.hpp"

#include "catch.hpp"
#include "gated_network.hpp"
#include "world.hpp"

namespace overlapped_runs {

using namespace lab;
namespace collectives = lamina::collectives;

constexpr std::uint64_t steps = 25;
constexpr std::int64_t batch_images = 4;  // of each worker
enum class loop { allreduce, plain, overlapped };

struct settings {
  lamina::compressor_options compression = {.drop_ratio = 0};
  sgd_options optimizer = {.learning_rate = 0.05F, .momentum = 0.9F, .weight_decay = 0.01F, .nesterov = true};
  loop by = loop::overlapped;
  overlap_options overlap = {};
  std::uint64_t steps = overlapped_runs::steps;
  bool normalises = true;      // by batch
  bool shares_images = false;  // those of all workers are one batch, in their order; else each has its own
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

// Images that tell their class.
inline batch_stream::batch labelled(const torch::Tensor& images) {
  return {images, images.flatten(1).slice(1, 0, classes).argmax(1)};
}

inline diary train_over(transport& ends, const settings& given) {
  worker_group group(ends);
  torch::manual_seed(100 +
                     static_cast<std::uint64_t>(group.worker()));  // those of worker 0 replace the others
  replica local{torch::nn::AnyModule(network(given.normalises)), given.compression.part_elements};
  const auto random = std::make_shared<at::Generator>(
      at::make_generator<at::CPUGeneratorImpl>(given.shares_images ? 7 : 7 + group.worker()));
  diary seen;
  const worker_tasks tasks = {
      .compute =
          [&](std::uint64_t, step_report& report) {
            const auto own = static_cast<std::int64_t>(given.shares_images ? group.worker() : 0);
            const auto workers = static_cast<std::int64_t>(given.shares_images ? group.workers() : 1);
            const torch::Tensor all = torch::randn({workers * batch_images, 3, 6, 6}, *random);
            compute_gradients(local, labelled(all.narrow(0, own * batch_images, batch_images)), report);
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
  training_plan plan = {.steps = given.steps,
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
      const auto channel = ends.make_channel();
      train_overlapped(group, *channel, local, tasks, worker, server, given.overlap, records, given.from);
    }
  }
  seen.at_end = parameters_of(local);
  return seen;
}

inline diary train(const settings& given) {
  const topology who = allreduce_topology(ranks());
  mpi_transport ends(MPI_COMM_WORLD, {.max_message_bytes = 1 << 22,
                                      .timeout_of = [](std::size_t) { return std::chrono::seconds(60); },
                                      .exchange_timeout = std::chrono::seconds(60),
                                      .name_of = [&](std::size_t rank) { return who.name_of(rank); }});
  return train_over(ends, given);
}

// The same workers as threads of this process, which take turns.
inline std::vector<diary> train_in_process(const settings& given) {
  std::vector<diary> seen(ranks());
  run_in_process(
      seen.size(),
      [&](transport& ends) {
        torch::set_num_threads(1);
        seen[ends.rank()] = train_over(ends, given);
      },
      {.name_of = [](std::size_t rank) { return "worker " + std::to_string(rank); }, .on_death = {}});
  return seen;
}

inline void require_equal_runs(const diary& a, const diary& b) {
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
inline void require_equal_replicas(const diary& run) {
  for (const std::vector<float>& own : run.parameters) {
    std::vector<float> first = own;
    check_mpi(MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD),
              "MPI_Bcast");
    REQUIRE(same_bits(own, first));
  }
}

}  // namespace overlapped_runs
