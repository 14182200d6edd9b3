// SPDX-License-Identifier: MIT
// Runs the loops of examples/resnet50_ps on a small model, under mpirun with any number of workers. Every
// rank passes through the same test cases in the same order; only rank 0 asserts.
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/utils.h>

#include <cstring>
#include <vector>

#include "replica.hpp"
#include "server.hpp"
#include "transport.hpp"
#include "worker.hpp"

#define CATCH_CONFIG_RUNNER
#include "catch.hpp"

namespace {

using namespace resnet50_ps;

constexpr std::uint64_t steps = 25;
constexpr std::int64_t features = 12;
constexpr std::int64_t classes = 5;

struct two_layers_impl : torch::nn::Module {
  two_layers_impl()
      : hidden(register_module("hidden", torch::nn::Linear(features, 64))),
        output(register_module("output", torch::nn::Linear(64, classes))) {}
  torch::Tensor forward(torch::Tensor x) { return output->forward(torch::relu(hidden->forward(x))); }
  torch::nn::Linear hidden, output;
};
TORCH_MODULE_IMPL(two_layers, two_layers_impl);

int rank_of_this() {
  int rank = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  return rank;
}

// One model a step, all layers one behind the other.
using history = std::vector<std::vector<float>>;

template <class LayerAt>
std::vector<float> flatten(const lamina::layout& model, LayerAt&& layer_at) {
  std::vector<float> flat;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const std::span<const float> elements = layer_at(l);
    flat.insert(flat.end(), elements.begin(), elements.end());
  }
  return flat;
}

// What each rank saw: parameters at the beginning of each step and at the end (steps + 1 models), gradients
// of each step.
struct outcome {
  std::vector<history> parameters;  // by rank; only rank 0 has them all
  std::vector<history> gradients;   // by worker
  std::vector<float> initial;
  std::vector<step_metrics> metrics;
  lamina::layout model{{}};
};

std::vector<history> gather(const history& mine, std::size_t models, std::size_t elements) {
  int ranks = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &ranks), "MPI_Comm_size");
  std::vector<float> send(models * elements);
  for (std::size_t i = 0; i < mine.size(); ++i)
    std::copy(mine[i].begin(), mine[i].end(), send.begin() + static_cast<std::ptrdiff_t>(i * elements));
  std::vector<float> received(send.size() * static_cast<std::size_t>(ranks));
  check_mpi(MPI_Gather(send.data(), static_cast<int>(send.size()), MPI_FLOAT, received.data(),
                       static_cast<int>(send.size()), MPI_FLOAT, 0, MPI_COMM_WORLD),
            "MPI_Gather");
  std::vector<history> all(static_cast<std::size_t>(ranks));
  auto from = received.begin();
  for (history& each : all) {
    for (std::size_t i = 0; i < models; ++i, from += static_cast<std::ptrdiff_t>(elements)) {
      each.emplace_back(from, from + static_cast<std::ptrdiff_t>(elements));
    }
  }
  return all;
}

outcome run(double drop_ratio, sgd_options optimizer) {
  const int rank = rank_of_this();
  torch::manual_seed(
      100 + rank);  // the workers begin with other parameters than the server: its frame must replace them
  replica local{torch::nn::AnyModule(two_layers())};
  transport link(MPI_COMM_WORLD, 1 << 20, std::chrono::seconds(60));

  outcome result;
  result.model = local.model;
  history parameters;
  history gradients;
  const auto parameters_now = [&] { return flatten(local.model, [&](std::size_t l) { return local[l]; }); };
  result.initial = parameters_now();
  if (rank == 0) {
    parameters.push_back(parameters_now());
    serve(
        link, local.model, [&](std::size_t l) { return local[l]; }, {steps, optimizer},
        [&](const step_metrics& step) {
          parameters.push_back(parameters_now());
          result.metrics.push_back(step);
        });
  } else {
    const auto next_batch = [&] {
      const torch::Tensor images = torch::randn({8, features});
      return batch_stream::batch(images, images.slice(1, 0, classes).argmax(1));
    };
    lamina::compressor_options compression{.drop_ratio = drop_ratio};
    compression.sender = static_cast<std::uint32_t>(rank - 1);
    work(link, local, next_batch, {steps, compression}, [&](std::uint64_t step) {
      parameters.push_back(parameters_now());
      if (step == 1) return;  // the gradients of the step before still stand in the tensors
      gradients.push_back(flatten(local.model, [&](std::size_t l) {
        return lamina::elements_of<float>(local.parameters[l].grad());
      }));
    });
  }
  result.parameters = gather(parameters, steps + 1, local.model.elements());
  result.gradients = gather(gradients, steps, local.model.elements());
  result.gradients.erase(result.gradients.begin());  // the server has none
  return result;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void require_equal_replicas(const outcome& result) {
  for (std::size_t rank = 1; rank < result.parameters.size(); ++rank) {
    for (std::size_t step = 0; step <= steps; ++step) {
      INFO("worker " << rank - 1 << ", parameters of step " << step + 1);
      REQUIRE(same_bits(result.parameters[rank][step], result.parameters[0][step]));
    }
  }
}

double mean_sent_up(const outcome& result) {
  double sum = 0;
  for (const step_metrics& step : result.metrics) sum += step.sent_up;
  return sum / static_cast<double>(result.metrics.size());
}

}  // namespace

TEST_CASE("mpi: every replica equals the server bit for bit after every step") {
  for (const float momentum : {0.0F, 0.9F}) {
    for (const double drop_ratio : {0.3, 0.9}) {
      const outcome result = run(drop_ratio, {0.05F, momentum});
      if (rank_of_this() != 0) continue;
      INFO("drop ratio " << drop_ratio << ", momentum " << momentum);
      require_equal_replicas(result);
      REQUIRE(result.parameters[0].front() == result.initial);
      REQUIRE(result.parameters[0].front() != result.parameters[0].back());
      if (drop_ratio > 0.5) REQUIRE(mean_sent_up(result) < 0.75);  // dropping took place
    }
  }
}

TEST_CASE("mpi: drop ratio 0 is dense SGD bit for bit") {
  constexpr float learning_rate = 0.05F;
  const outcome result = run(0, {learning_rate, 0});
  if (rank_of_this() != 0) return;
  require_equal_replicas(result);
  REQUIRE(mean_sent_up(result) >= 1);

  std::vector<float> x = result.initial;
  for (std::size_t step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      float sum = result.gradients[0][step][i];
      for (std::size_t w = 1; w < result.gradients.size(); ++w) sum += result.gradients[w][step][i];
      x[i] -= learning_rate * (sum / static_cast<float>(result.gradients.size()));
    }
    INFO("step " << step + 1);
    REQUIRE(same_bits(x, result.parameters[0][step + 1]));
  }
}

int main(int argc, char** argv) {
  const mpi_session session(argc, argv);
  torch::set_num_threads(1);
  const int failures = Catch::Session().run(argc, argv);
  // One rank that fails must not leave the others waiting for the next test case.
  if (failures != 0) MPI_Abort(MPI_COMM_WORLD, 1);
  return 0;
}
