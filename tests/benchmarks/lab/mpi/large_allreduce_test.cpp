// SPDX-License-Identifier: MIT
// An allreduce of a layer that is longer than one chunk of what is added up at a time, so that it is cut.
#include <torch/nn/modules/linear.h>  // Torch defines CHECK, so its headers come before Catch2's.

#include <cstdint>
#include <lamina/options.hpp>
#include <span>
#include <vector>

#include "catch.hpp"
#include "launch/topology.hpp"
#include "loops/allreduce.hpp"
#include "messages/mpi_transport.hpp"
#include "messages/worker_group.hpp"
#include "model/replica.hpp"

using namespace lab;

namespace {

constexpr std::uint64_t steps = 2;
constexpr float learning_rate = 0.125F;

// Other numbers at each place, so that a piece that lands elsewhere is seen; integers, whose sums are exact.
float gradient_at(std::size_t worker, std::uint64_t step, std::size_t layer, std::size_t i) {
  return static_cast<float>((7 * i + i / 4096 + 3 * worker + 5 * step + layer) % 61);
}

}  // namespace

TEST_CASE("mpi: an allreduce applies the mean of a layer longer than a chunk where it belongs") {
  int rank = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  torch::manual_seed(1);
  // 2,048 elements more than 4 Mi, and a bias: the second chunk holds the end of one layer and all of the other.
  const replica made(torch::nn::AnyModule(torch::nn::Linear(2048, 2049)));
  replica local = made;
  std::vector<std::vector<float>> expected;
  for (std::size_t l = 0; l < local.model().layers(); ++l)
    expected.emplace_back(local[l].begin(), local[l].end());

  int ranks = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &ranks), "MPI_Comm_size");
  const auto workers = static_cast<std::size_t>(ranks);
  const topology who = allreduce_topology(workers);
  mpi_transport here(MPI_COMM_WORLD, {.max_message_bytes = std::size_t{1} << 27,
                                      .timeout_of = [](std::size_t) { return std::chrono::seconds(60); },
                                      .exchange_timeout = std::chrono::seconds(60),
                                      .name_of = [&](std::size_t each) { return who.name_of(each); }});
  worker_group group(here);
  const training_plan plan = {.steps = steps, .agrees_on_selection = true, .evaluates = false};
  const worker_tasks tasks = {.compute =
                                  [&](std::uint64_t step, step_report&) {
                                    std::vector<torch::Tensor> gradients;
                                    for (std::size_t l = 0; l < local.model().layers(); ++l) {
                                      std::vector<float> values(local[l].size());
                                      for (std::size_t i = 0; i < values.size(); ++i)
                                        values[i] = gradient_at(group.worker(), step, l, i);
                                      gradients.push_back(torch::tensor(values));
                                    }
                                    local.set_gradients(gradients);
                                  },
                              .evaluate = {},
                              .pulled = {},
                              .save = {},
                              .load = {}};
  train_by_allreduce(group, local, tasks, {.plan = plan, .compression = {.drop_ratio = 0}},
                     {.plan = plan,
                      .optimizer = {.learning_rate = learning_rate},
                      .learning_rate = learning_rate_schedule(learning_rate, {}, 0)},
                     {.records = {.record = [](const step_metrics&) {},
                                  .record_evaluation = [](std::uint64_t, const evaluation&) {}},
                      .updated = {},
                      .save = {}},
                     {});

  for (std::size_t l = 0; l < expected.size(); ++l) {
    for (std::size_t i = 0; i < expected[l].size(); ++i) {
      for (std::uint64_t step = 1; step <= steps; ++step) {
        float sum = 0;
        for (std::size_t w = 0; w < workers; ++w) sum += gradient_at(w, step, l, i);
        expected[l][i] -= learning_rate * (sum / static_cast<float>(workers));
      }
      if (local[l][i] != expected[l][i]) FAIL("layer " << l << ", element " << i << ": " << local[l][i]);
    }
  }
}
