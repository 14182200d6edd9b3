// SPDX-License-Identifier: MIT
// Runs the loops of benchmarks/lab on a small model, under mpirun with any number of workers and in one process.
// Every rank passes through the same test cases in the same order; only rank 0 asserts.
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/utils.h>

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <lamina/worker.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "launch/topology.hpp"
#include "loops/allreduce.hpp"
#include "loops/dense_allreduce.hpp"
#include "loops/node.hpp"
#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "messages/in_process_transport.hpp"
#include "messages/mpi_transport.hpp"
#include "messages/worker_group.hpp"
#include "model/passes.hpp"
#include "model/replica.hpp"
#include "state/saved_run.hpp"

#define CATCH_CONFIG_RUNNER
#include "catch.hpp"
#include "world.hpp"

namespace {

using namespace lab;

constexpr std::uint64_t steps = 25;
constexpr std::int64_t features = 12;
constexpr std::int64_t classes = 5;

struct two_layers_impl : torch::nn::Module {
  explicit two_layers_impl(std::int64_t width)
      : hidden(register_module("hidden", torch::nn::Linear(features, width))),
        output(register_module("output", torch::nn::Linear(width, classes))),
        numbers(register_buffer("numbers", torch::zeros({2}))) {}
  torch::Tensor forward(torch::Tensor x) { return output->forward(torch::relu(hidden->forward(x))); }
  torch::nn::Linear hidden, output;
  torch::Tensor numbers;  // in place of batch-norm statistics
};
TORCH_MODULE_IMPL(two_layers, two_layers_impl);

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

struct settings {
  lamina::compressor_options compression;
  sgd_options optimizer = {.learning_rate = 0.05F};
  bool agreed = false;
  bool asynchronous = false;
  bool by_allreduce = false;
  bool by_mpi_allreduce = false;  // the same without lamina
  std::size_t workers_per_node = 1;
  std::int64_t width = 64;       // of the model
  bool fixed_gradients = false;  // that do not depend on the parameters; sums of both are exact
  bool mirrored = false;         // as if the networks were on another device
  std::uint64_t hash_period_steps = 10;
  std::chrono::seconds timeout{60};
  std::optional<std::size_t>
      evaluates_long;  // this worker, for longer than that: in nodes midway, at the end otherwise
  std::optional<std::uint64_t> staleness_steps;  // of the asynchronous server
  bool evaluates = true;
  loss_plan lossy = {};  // in one process, over such a network
  lossy_options network = {};
  /// Of a worker, before it computes a step.
  std::function<void(transport& ranks, std::size_t worker, std::uint64_t step)> delay;
  /// Of a worker, at the beginning of a step.
  std::function<void(std::size_t worker, std::uint64_t step, replica&)> meddle;
  std::vector<std::string>* losses = nullptr;  // where the server, which then goes on, says what it lost
};

topology topology_of(const settings& given, std::size_t workers) {
  return given.by_allreduce ? allreduce_topology(workers) : hybrid_topology(workers, given.workers_per_node);
}

// What the server, or a worker, saw.
struct diary {
  history
      parameters;  // at the beginning of each step and at the end: steps + 1; of the asynchronous server at the ends
  history gradients;                  // of each step; the server has none
  std::vector<step_metrics> metrics;  // of the server
  std::map<std::uint64_t, evaluation> evaluations;
};

// Each begins with parameters of its own: the server's first frame must replace the workers'.
replica make_replica(std::size_t seed, const settings& given) {
  torch::manual_seed(100 + seed);
  two_layers network(given.width);
  if (given.fixed_gradients) {
    const torch::NoGradGuard no_gradients;
    for (torch::Tensor& each : network->parameters()) each.copy_(each.mul(4096).round().div(4096));
  }
  return replica{torch::nn::AnyModule(network), given.compression.part_elements, torch::kCPU, given.mirrored};
}

std::vector<float> parameters_of(const replica& local) {
  return flatten(local.model(), [&](std::size_t l) { return local[l]; });
}

// The loops write what they see into it.
server_tasks server_tasks_of(diary& seen, const replica& local) {
  return {.records = {.record =
                          [&](const step_metrics& step) {
                            seen.parameters.push_back(parameters_of(local));
                            seen.metrics.push_back(step);
                          },
                      .record_evaluation = [&](std::uint64_t step,
                                               const evaluation& whole) { seen.evaluations[step] = whole; }},
          .updated = {},
          .save = {}};
}

training_plan plan_of(const settings& given) {
  training_plan plan = {.steps = steps, .agrees_on_selection = given.agreed, .evaluation_period_steps = 7};
  plan.evaluates = given.evaluates;
  plan.hash_period_steps = given.asynchronous ? 0 : given.hash_period_steps;
  plan.losses = given.lossy;
  return plan;
}

server_options server_options_of(const settings& given) {
  return {.plan = plan_of(given),
          .optimizer = given.optimizer,
          .learning_rate = learning_rate_schedule(given.optimizer.learning_rate, {}, 0),
          .staleness_steps = given.staleness_steps};
}

// `seen.parameters` of a worker are those that each step begins with.
worker_tasks worker_tasks_of(diary& seen, replica& local, std::size_t worker, const settings& given) {
  const auto random = std::make_shared<at::Generator>(at::make_generator<at::CPUGeneratorImpl>(worker));
  return {.compute =
              [&local, random, worker, is_fixed = given.fixed_gradients](std::uint64_t step,
                                                                         step_report& report) {
                const torch::Tensor images = torch::randn({8, features}, *random);
                compute_gradients(local, {images, images.slice(1, 0, classes).argmax(1)}, report);
                // A power of two, so that rounding is the same.
                const auto mine = static_cast<float>(1 + worker);
                std::vector<torch::Tensor> statistics = local.statistics();
                statistics[0][0] = mine;
                statistics[0][1] = 8 * mine;
                local.set_statistics(statistics);
                if (!is_fixed) return;
                for (torch::Tensor each : local.gradients()) {
                  each.fill_(0x1p-10F * static_cast<float>((worker + 1) * (step % 3 + 1)));
                }
              },
          .evaluate = {},
          .pulled =
              [&](std::uint64_t step) {
                seen.parameters.push_back(parameters_of(local));
                if (step == 1) return;  // the gradients of the step before still stand in the tensors
                const auto gradients = local.gradients();
                seen.gradients.push_back(flatten(local.partition().model(), [&](std::size_t l) {
                  return lamina::elements_of<float>(gradients[l]);
                }));
              },
          .save = {},
          .load = {}};
}

worker_options worker_options_of(const settings& given, std::size_t sender) {
  worker_options options = {.plan = plan_of(given), .compression = given.compression};
  options.compression.sender = static_cast<std::uint32_t>(sender);
  options.compression.frame_checksum = checksum_of(given.lossy);
  return options;
}

void play_server(transport& ranks, const settings& given, const topology& who, diary& seen) {
  const replica local = make_replica(0, given);
  seen.parameters.push_back(parameters_of(local));
  std::vector<client> clients;
  for (const auto& node : who.nodes) clients.push_back({node.front(), node.size()});
  std::function<void(const std::string&)> on_loss;
  if (given.losses != nullptr) on_loss = [&](const std::string& what) { given.losses->push_back(what); };
  server_link link(ranks, clients, on_loss);
  const server_tasks tasks = server_tasks_of(seen, local);
  if (given.asynchronous) {
    serve_asynchronously(link, local, server_options_of(given), tasks);
  } else {
    serve(link, local, server_options_of(given), tasks);
  }
}

// In place of an evaluation: the statistics are a mean over the workers, which has one right answer. Midway an
// asynchronous server has it of those that have got there.
void check_mean(transport& ranks, const topology& who, const settings& given, const replica& local,
                std::uint64_t step, step_report& report) {
  const auto workers = static_cast<float>(who.workers());
  const std::size_t worker = who.worker_on(ranks.rank());
  const std::vector<torch::Tensor> statistics = local.statistics();
  const std::span<const float> values = lamina::elements_of<float>(statistics[0]);
  const float expected = (workers + 1) / 2;
  const bool is_last = step > steps;
  const bool is_of_some = (given.asynchronous && !is_last) || given.losses != nullptr;
  const bool is_right = is_of_some ? values[0] >= 1 && values[0] <= workers : values[0] == expected;
  if (!is_right || values[1] != 8 * values[0]) throw std::runtime_error("the mean is wrong");
  report.test_images = 1;
  report.test_top1 = worker == 0 ? 1 : 0;
  const bool is_long = given.workers_per_node == 1 ? is_last : report.replica_hash != 0 && !is_last;
  if (given.evaluates_long != worker || !is_long) return;
  const auto end = std::chrono::steady_clock::now() + 2 * given.timeout + given.timeout / 2;
  while (std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks.show_life();
  }
}

void add_check_of_means(worker_tasks& tasks, transport& ranks, const topology& who, const settings& given,
                        const replica& local) {
  const auto now = std::make_shared<std::uint64_t>();
  tasks.pulled = [now, note = tasks.pulled](std::uint64_t step) {
    *now = step;
    note(step);
  };
  tasks.evaluate = [&, now](step_report& report) { check_mean(ranks, who, given, local, *now, report); };
}

void play_worker(transport& ranks, const settings& given, const topology& who, diary& seen) {
  const std::size_t worker = who.worker_on(ranks.rank());
  const std::size_t node = who.node_of(ranks.rank());
  const std::size_t leader = who.nodes[node].front();
  replica local = make_replica(1 + worker, given);
  worker_tasks tasks = worker_tasks_of(seen, local, worker, given);
  if (given.meddle) {
    tasks.pulled = [&, note = tasks.pulled](std::uint64_t step) {
      note(step);
      given.meddle(worker, step, local);
    };
  }
  if (given.delay) {
    tasks.compute = [&, compute = tasks.compute](std::uint64_t step, step_report& report) {
      given.delay(ranks, worker, step);
      compute(step, report);
    };
  }
  const worker_options options = worker_options_of(given, node);
  add_check_of_means(tasks, ranks, who, given, local);
  worker_link link(ranks, ranks.rank() == leader ? 0 : leader);
  if (ranks.rank() != leader) return work_in_node(link, local, tasks, options);
  if (who.nodes[node].size() == 1) return work(link, local, tasks, options);
  std::vector<client> members;
  for (const std::size_t rank : who.below(leader)) members.push_back({.rank = rank});
  server_link node_link(ranks, members);
  lead_node(link, node_link, local, tasks, options);
}

void play_without_server(transport& ranks, const settings& given, const topology& who, diary& seen) {
  worker_group group(ranks);
  replica local = make_replica(ranks.rank(), given);
  diary records;
  worker_tasks tasks = worker_tasks_of(seen, local, group.worker(), given);
  add_check_of_means(tasks, ranks, who, given, local);
  if (given.by_mpi_allreduce) {
    train_by_mpi_allreduce(group, MPI_COMM_WORLD, local, tasks, worker_options_of(given, group.worker()),
                           server_options_of(given), server_tasks_of(records, local));
  } else {
    train_by_allreduce(group, local, tasks, worker_options_of(given, group.worker()),
                       server_options_of(given), server_tasks_of(records, local), {});
  }
  seen.metrics = records.metrics;
  seen.evaluations = records.evaluations;
}

void play(transport& ranks, const settings& given, const topology& who, diary& seen) {
  if (!who.has_server) {
    play_without_server(ranks, given, who, seen);
  } else if (who.is_server(ranks.rank())) {
    play_server(ranks, given, who, seen);
  } else {
    play_worker(ranks, given, who, seen);
  }
}

// Models of all ranks, known to rank 0.
std::vector<history> gather(const history& mine, std::size_t models, std::size_t elements) {
  std::vector<float> sent(models * elements);
  for (std::size_t i = 0; i < mine.size(); ++i)
    std::copy(mine[i].begin(), mine[i].end(), sent.begin() + static_cast<std::ptrdiff_t>(i * elements));
  std::vector<float> received(sent.size() * ranks());
  check_mpi(MPI_Gather(sent.data(), static_cast<int>(sent.size()), MPI_FLOAT, received.data(),
                       static_cast<int>(sent.size()), MPI_FLOAT, 0, MPI_COMM_WORLD),
            "MPI_Gather");
  std::vector<history> all(ranks());
  auto from = received.begin();
  for (history& each : all) {
    for (std::size_t i = 0; i < models; ++i, from += static_cast<std::ptrdiff_t>(elements)) {
      each.emplace_back(from, from + static_cast<std::ptrdiff_t>(elements));
    }
  }
  return all;
}

// The server's diary and those of the workers; over MPI only rank 0 gets them.
using diaries = std::vector<diary>;

std::string name_of(std::size_t rank) {
  return rank == 0 ? "the server" : "worker " + std::to_string(rank - 1);
}

diaries run_over_mpi(const settings& given) {
  // Without a server there is one worker more.
  const topology who = topology_of(given, given.by_allreduce ? ranks() : ranks() - 1);
  mpi_transport transport(MPI_COMM_WORLD, {.max_message_bytes = 1 << 20,
                                           .timeout_of = [&](std::size_t) { return given.timeout; },
                                           .exchange_timeout = given.timeout,
                                           .name_of = name_of,
                                           .above = who.above(static_cast<std::size_t>(rank_of_this())),
                                           .life_period = given.timeout / 4});
  diary mine;
  play(transport, given, who, mine);
  const std::size_t elements = mine.parameters.front().size();
  const auto parameters = gather(mine.parameters, steps + 1, elements);
  const auto gradients = gather(mine.gradients, steps, elements);
  diaries all(ranks());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    all[rank].parameters = parameters[rank];
    if (rank > 0 || !who.has_server) all[rank].gradients = gradients[rank];
  }
  all[0].metrics = mine.metrics;
  all[0].evaluations = mine.evaluations;
  return all;
}

diaries run_in_one_process(const settings& given, std::size_t workers) {
  const topology who = topology_of(given, workers);
  diaries all(who.ranks());
  const auto body = [&](transport& ranks) { play(ranks, given, who, all[ranks.rank()]); };
  in_process_options options{.name_of = name_of, .on_death = {}};
  if (given.losses != nullptr) options.on_death = [](std::size_t, const std::exception&) {};
  if (given.lossy.is_lossy) options.losses = given.network;
  run_in_process(who.ranks(), body, options);
  return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void require_equal_replicas(const diaries& run) {
  for (std::size_t rank = 1; rank < run.size(); ++rank) {
    for (std::size_t step = 0; step <= steps; ++step) {
      INFO("worker " << rank - 1 << ", parameters of step " << step + 1);
      REQUIRE(same_bits(run[rank].parameters[step], run[0].parameters[step]));
    }
  }
}

void require_equal_ends(const diaries& run) {
  for (std::size_t rank = 1; rank < run.size(); ++rank) {
    INFO("worker " << rank - 1);
    REQUIRE(same_bits(run[rank].parameters.back(), run[0].parameters.back()));
  }
}

void require_equal_runs(const diaries& a, const diaries& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t rank = 0; rank < a.size(); ++rank) {
    INFO("rank " << rank);
    REQUIRE(a[rank].parameters.size() == b[rank].parameters.size());
    REQUIRE(a[rank].gradients.size() == b[rank].gradients.size());
    for (std::size_t i = 0; i < a[rank].parameters.size(); ++i) {
      REQUIRE(same_bits(a[rank].parameters[i], b[rank].parameters[i]));
    }
    for (std::size_t i = 0; i < a[rank].gradients.size(); ++i) {
      REQUIRE(same_bits(a[rank].gradients[i], b[rank].gradients[i]));
    }
  }
  for (std::size_t i = 0; i < a[0].metrics.size(); ++i) {
    const step_metrics& one = a[0].metrics[i];
    const step_metrics& other = b[0].metrics[i];
    REQUIRE(one.loss == other.loss);
    REQUIRE(one.sent_up == other.sent_up);
    REQUIRE(one.sent_down == other.sent_down);
    REQUIRE(one.arrived == other.arrived);
    REQUIRE(one.threshold == other.threshold);
  }
}

double mean_sent_up(const diaries& run) {
  double sum = 0;
  for (const step_metrics& step : run[0].metrics) sum += step.sent_up;
  return sum / static_cast<double>(run[0].metrics.size());
}

settings with_drop_ratio(double drop_ratio) {
  settings given;
  given.compression.drop_ratio = drop_ratio;
  return given;
}

}  // namespace

TEST_CASE("mpi: every replica equals the server bit for bit after every step") {
  for (const float momentum : {0.0F, 0.9F}) {
    for (const double drop_ratio : {0.3, 0.9}) {
      settings given = with_drop_ratio(drop_ratio);
      given.optimizer.momentum = momentum;
      const diaries run = run_over_mpi(given);
      if (rank_of_this() != 0) continue;
      INFO("drop ratio " << drop_ratio << ", momentum " << momentum);
      require_equal_replicas(run);
      REQUIRE(run[0].parameters.front() != run[0].parameters.back());
      if (drop_ratio > 0.5) REQUIRE(mean_sent_up(run) < 0.75);  // dropping took place
    }
  }
}

TEST_CASE("mpi: drop ratio 0 is dense SGD bit for bit") {
  const diaries run = run_over_mpi(with_drop_ratio(0));
  if (rank_of_this() != 0) return;
  require_equal_replicas(run);
  REQUIRE(mean_sent_up(run) >= 1);

  std::vector<float> x = run[0].parameters.front();
  for (std::size_t step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      float sum = run[1].gradients[step][i];
      for (std::size_t w = 2; w < run.size(); ++w) sum += run[w].gradients[step][i];
      x[i] -= 0.05F * (sum / static_cast<float>(run.size() - 1));
    }
    INFO("step " << step + 1);
    REQUIRE(same_bits(x, run[0].parameters[step + 1]));
  }
}

TEST_CASE("mpi: a run in one process is the same to the last bit") {
  std::vector<settings> all(9, with_drop_ratio(0.7));
  all[1].agreed = true;
  all[2].compression.byte_budget = 0.2;
  all[3].compression.payload = lamina::payload_type::int8;
  all[3].optimizer.momentum = 0.9F;
  all[4].compression.momentum = 0.9;
  all[4].compression.warm_up_steps = 10;
  all[5].asynchronous = true;
  all[6].workers_per_node = 2;
  all[6].optimizer.momentum = 0.9F;
  all[7].workers_per_node = 3;
  all[7].agreed = true;
  all[8].by_allreduce = true;
  all[8].agreed = true;
  for (std::size_t i = 0; i < all.size(); ++i) {
    // The order in which frames reach an asynchronous server differs from run to run, but for a single worker.
    if (all[i].asynchronous && ranks() > 2) continue;
    const diaries over_mpi = run_over_mpi(all[i]);
    if (rank_of_this() != 0) continue;
    INFO("settings " << i);
    const std::size_t workers = all[i].by_allreduce ? ranks() : ranks() - 1;
    const diaries in_process = run_in_one_process(all[i], workers);
    require_equal_runs(over_mpi, in_process);
    for (const diaries* run : {&over_mpi, &in_process}) {
      const auto& evaluations = (*run)[0].evaluations;
      REQUIRE(evaluations.size() == 4);  // after 7, 14, 21 and 25 steps
      for (const auto& [step, whole] : evaluations) {
        REQUIRE(whole.images == workers);
        REQUIRE(whole.top1 == 1);
      }
    }
  }
}

TEST_CASE("mpi: workers that agree send the same layers, so that what goes up is what comes down") {
  settings given = with_drop_ratio(0.7);
  given.agreed = true;
  const diaries agreed = run_over_mpi(given);
  given.agreed = false;
  const diaries local = run_over_mpi(given);
  if (rank_of_this() != 0) return;
  require_equal_replicas(agreed);
  double agreed_down = 0;
  double local_down = 0;
  double local_up = 0;
  for (std::size_t i = 1; i < steps; ++i) {
    REQUIRE(agreed[0].metrics[i].sent_down == Approx(agreed[0].metrics[i - 1].sent_up).epsilon(1e-12));
    agreed_down += agreed[0].metrics[i].sent_down;
    local_down += local[0].metrics[i].sent_down;
    local_up += local[0].metrics[i - 1].sent_up;
  }
  // The control: each for itself, they send different ones.
  if (ranks() > 2) REQUIRE(local_down > 1.05 * local_up);
}

TEST_CASE("mpi: in nodes, every replica equals the server bit for bit after every step") {
  for (const std::size_t workers_per_node : {2, 3, 9}) {
    settings given = with_drop_ratio(0.7);
    given.workers_per_node = workers_per_node;
    const diaries run = run_over_mpi(given);
    if (rank_of_this() != 0) continue;
    INFO("nodes of " << workers_per_node);
    require_equal_replicas(run);
    REQUIRE(mean_sent_up(run) < 0.9);
  }
}

TEST_CASE("mpi: in nodes, drop ratio 0 is dense SGD at the mean over the workers, bit for bit") {
  settings given = with_drop_ratio(0);
  const diaries flat = run_over_mpi(given);
  given.workers_per_node = 9;  // one node, whose sum in the order of the workers is the server's
  const diaries one_node = run_over_mpi(given);
  given.workers_per_node = 2;
  const diaries run = run_over_mpi(given);
  if (rank_of_this() != 0) return;
  const std::size_t workers = run.size() - 1;
  std::vector<float> x = run[0].parameters.front();
  for (std::size_t step = 0; step < steps; ++step) {
    INFO("step " << step + 1);
    REQUIRE(same_bits(one_node[0].parameters[step + 1], flat[0].parameters[step + 1]));
    for (std::size_t i = 0; i < x.size(); ++i) {
      float sum = run[1].gradients[step][i];  // in a leader's tensors stands the sum over its node
      for (std::size_t leader = 3; leader <= workers; leader += 2) sum += run[leader].gradients[step][i];
      x[i] -= 0.05F * (sum / static_cast<float>(workers));
    }
    REQUIRE(same_bits(x, run[0].parameters[step + 1]));
  }
}

TEST_CASE("mpi: an allreduce of agreed layers is the server's run with agreed selection, bit for bit") {
  for (const float momentum : {0.0F, 0.9F}) {
    settings given = with_drop_ratio(0.7);
    given.agreed = true;
    given.optimizer.momentum = momentum;
    given.by_allreduce = true;
    const diaries reduced = run_over_mpi(given);
    if (rank_of_this() != 0) continue;
    require_equal_replicas(reduced);
    REQUIRE(mean_sent_up(reduced) < 0.9);
    // All of them begin with the parameters of rank 0; gradients are of worker w here and there.
    given.by_allreduce = false;
    const diaries served = run_in_one_process(given, ranks());
    for (std::size_t step = 0; step <= steps; ++step) {
      INFO("momentum " << momentum << ", parameters of step " << step + 1);
      REQUIRE(same_bits(reduced[0].parameters[step], served[0].parameters[step]));
    }
  }
}

TEST_CASE("mpi: an evaluation longer than the timeout is no loss, of whoever waits for it") {
  if (ranks() < 5) return;  // with two nodes wait all that wait with fewer workers
  for (const std::size_t workers_per_node : {1, 2}) {
    settings given = with_drop_ratio(0.7);
    given.workers_per_node = workers_per_node;
    given.timeout = std::chrono::seconds(2);
    given.evaluates_long = workers_per_node - 1;  // in a node a member
    given.hash_period_steps = 14;                 // with the second of four evaluations
    const diaries run = run_over_mpi(given);
    if (rank_of_this() == 0) require_equal_replicas(run);
  }
}

TEST_CASE("mpi: a mean that was abandoned is whole for a worker that is revived and takes it") {
  if (ranks() != 3) return;
  constexpr std::size_t count = std::size_t{1} << 18;  // more than MPI takes before the receiver asks
  constexpr std::size_t server = 0;
  constexpr std::size_t revived = 1;
  const topology who = flat_topology(ranks() - 1);
  std::chrono::seconds patience(rank_of_this() == 0 ? 2 : 60);
  mpi_transport transport(MPI_COMM_WORLD, {.max_message_bytes = 1 << 24,
                                           .timeout_of = [&](std::size_t) { return patience; },
                                           .exchange_timeout = std::chrono::seconds(60),
                                           .name_of = name_of});
  const double expected = static_cast<double>(who.workers() + 1) / 2;
  if (transport.rank() == server) {
    std::vector<std::string> losses;
    std::vector<client> clients;
    for (const auto& node : who.nodes) clients.push_back({.rank = node.front()});
    server_link link(transport, clients, [&](const std::string& what) { losses.push_back(what); });
    link.average();
    REQUIRE(losses.size() == 1);
    REQUIRE_THAT(losses[0], Catch::EndsWith("while sending to worker 0"));
    patience = std::chrono::seconds(60);
    // Where the mean lay, if it was freed.
    const std::vector<std::vector<double>> others(8, std::vector<double>(count, -1));
    link.receive_from_all(message_kind::report);
    REQUIRE(others.back().back() == -1);
    return;
  }
  worker_link link(transport, server);
  std::vector<double> values(count, static_cast<double>(transport.rank()));
  if (transport.rank() != revived) {
    link.average(values);
    transport.receive_from_each({&revived, 1});
    return link.send(message_kind::report, {});
  }
  std::vector<double> asking = values;
  asking.insert(asking.begin(), 1);  // over one worker
  link.send(message_kind::values, payload(std::as_bytes(std::span<const double>(asking))));
  std::this_thread::sleep_for(std::chrono::seconds(5));  // MPI moves nothing on meanwhile
  const message mean = link.receive(message_kind::mean);
  REQUIRE(mean.bytes.size() == count * sizeof(double));
  std::memcpy(values.data(), mean.bytes.data(), mean.bytes.size());
  REQUIRE(values == std::vector<double>(count, expected));
  for (std::size_t other = revived + 1; other < ranks(); ++other) {
    transport.send({&other, 1}, message_kind::report, {});
  }
}

TEST_CASE("mpi: plain MPI_Allreduce trains as an allreduce of all layers does") {
  settings given = with_drop_ratio(0);
  given.agreed = true;
  given.by_allreduce = true;
  given.optimizer = {.learning_rate = 0.05F, .momentum = 0.9F, .weight_decay = 0.01F};
  const diaries by_lamina = run_over_mpi(given);
  given.by_mpi_allreduce = true;
  const diaries plain = run_over_mpi(given);
  if (rank_of_this() != 0) return;
  require_equal_replicas(plain);
  REQUIRE(plain[0].metrics.size() == steps);
  REQUIRE(plain[0].evaluations.size() == by_lamina[0].evaluations.size());
  // MPI chooses the order of the sums.
  const std::vector<float>& expected = by_lamina[0].parameters.back();
  const std::vector<float>& found = plain[0].parameters.back();
  for (std::size_t i = 0; i < found.size(); ++i)
    REQUIRE(found[i] == Approx(expected[i]).epsilon(1e-3).margin(1e-4));
}

TEST_CASE("mpi: an asynchronous server with one worker is the synchronous one") {
  if (ranks() > 2) return;
  settings given = with_drop_ratio(0.7);
  const diaries synchronous = run_over_mpi(given);
  given.asynchronous = true;
  const diaries asynchronous = run_over_mpi(given);
  if (rank_of_this() == 0) require_equal_runs(synchronous, asynchronous);
}

TEST_CASE(
    "in process: an asynchronous server with many workers moves as far in a step as the synchronous one") {
  if (rank_of_this() != 0) return;
  settings given = with_drop_ratio(0);
  given.optimizer = {.learning_rate = 0.05F, .momentum = 0.9F, .weight_decay = 0.1F};
  given.fixed_gradients = true;
  for (const bool nesterov : {false, true}) {
    given.optimizer.nesterov = nesterov;
    given.asynchronous = false;
    const diaries synchronous = run_in_one_process(given, 3);
    given.asynchronous = true;
    const diaries asynchronous = run_in_one_process(given, 3);
    const std::vector<float>& expected = synchronous[0].parameters.back();
    const std::vector<float>& found = asynchronous[0].parameters.back();
    REQUIRE(found.size() == expected.size());
    // Shares are added one by one, and so rounded otherwise.
    for (std::size_t i = 0; i < found.size(); ++i)
      REQUIRE(found[i] == Approx(expected[i]).epsilon(1e-4).margin(1e-5));
  }
}

TEST_CASE("mpi: an asynchronous server trains, and says how stale the frames are") {
  settings given = with_drop_ratio(0.7);
  given.asynchronous = true;
  run_over_mpi(given);  // one run leaves nothing behind for the next
  const diaries over_mpi = run_over_mpi(given);
  if (rank_of_this() != 0) return;
  const std::size_t workers = ranks() - 1;
  const diaries in_process = run_in_one_process(given, workers);
  for (const diaries* run : {&over_mpi, &in_process}) {
    const auto& metrics = (*run)[0].metrics;
    REQUIRE(metrics.size() == steps);
    double first = 0;
    double last = 0;
    for (std::size_t i = 0; i < 5; ++i) {
      first += metrics[i].loss;
      last += metrics[steps - 1 - i].loss;
    }
    REQUIRE(last < 0.97 * first);
    require_equal_ends(*run);
  }
  // In turn, each frame has seen all but those of the other workers in between.
  for (std::size_t i = 1; i < steps; ++i) {
    REQUIRE(in_process[0].metrics[i].staleness == static_cast<double>(workers - 1));
  }
}

// Lets the others go on six times while worker 0 takes one step, and notes by how many steps any has begun ahead of the slowest.
struct slow_worker {
  std::vector<std::uint64_t> done;
  std::uint64_t largest_lead = 0;

  explicit slow_worker(std::size_t workers) : done(workers) {}
  void operator()(transport& ranks, std::size_t worker, std::uint64_t step) {
    largest_lead = std::max(largest_lead, step - 1 - *std::ranges::min_element(done));
    worker_link link(ranks, 0);
    std::array<double, 1> value = {};
    for (int k = 0; worker == 0 && k < 5; ++k) link.average(value);
    done[worker] = step;
  }
};

TEST_CASE("in process: no worker is further ahead of a slow one than the staleness allows") {
  if (rank_of_this() != 0) return;
  constexpr std::size_t workers = 4;
  const std::optional<std::uint64_t> unbounded;
  for (const std::optional<std::uint64_t> bound : {std::optional<std::uint64_t>(0), {1}, {4}, unbounded}) {
    INFO("staleness " << (bound ? std::to_string(*bound) : "unbounded"));
    settings given = with_drop_ratio(0.7);
    given.asynchronous = true;
    given.evaluates = false;
    given.staleness_steps = bound;
    slow_worker slow(workers);
    given.delay = std::ref(slow);
    const diaries run = run_in_one_process(given, workers);
    if (bound) {
      REQUIRE(slow.largest_lead == *bound);
      // While it computes a step, each other one ends the steps that it may be behind, that step, and those it may be ahead.
      for (const step_metrics& step : run[0].metrics)
        REQUIRE(step.staleness <= static_cast<double>((2 * *bound + 1) * (workers - 1)));
    } else {
      REQUIRE(slow.largest_lead > 10);
    }
    require_equal_ends(run);
  }
}

TEST_CASE("in process: an asynchronous server applies each gradient once, however far workers are apart") {
  if (rank_of_this() != 0) return;
  constexpr std::size_t workers = 4;
  settings given = with_drop_ratio(0);
  given.optimizer.learning_rate = 0x1p-4F;
  given.fixed_gradients = true;
  given.evaluates = false;
  const diaries synchronous = run_in_one_process(given, workers);
  given.asynchronous = true;
  for (const std::optional<std::uint64_t> bound : {std::optional<std::uint64_t>(), {0}, {2}}) {
    given.staleness_steps = bound;
    slow_worker slow(workers);
    given.delay = std::ref(slow);
    const diaries asynchronous = run_in_one_process(given, workers);
    REQUIRE(same_bits(asynchronous[0].parameters.back(), synchronous[0].parameters.back()));
    require_equal_ends(asynchronous);
  }
}

TEST_CASE("mpi: a worker that does not take its parameters holds up no other of an asynchronous server") {
  if (ranks() < 3) return;
  constexpr std::size_t server = 0;
  constexpr std::size_t deaf = 1;
  settings given = with_drop_ratio(0);
  given.asynchronous = true;
  given.evaluates = false;
  given.width = 4096;  // more than MPI takes before the receiver asks
  given.delay = [&](transport& all, std::size_t, std::uint64_t step) {
    if (step == steps) all.send({&deaf, 1}, message_kind::report, {});
  };
  const topology who = flat_topology(ranks() - 1);
  mpi_transport transport(MPI_COMM_WORLD, {.max_message_bytes = 1 << 20,
                                           .timeout_of = [&](std::size_t) { return given.timeout; },
                                           .exchange_timeout = given.timeout,
                                           .name_of = name_of});
  diary mine;
  if (transport.rank() == deaf) {
    worker_link link(transport, server);
    replica local = make_replica(1, given);
    const worker_tasks tasks = worker_tasks_of(mine, local, 0, given);
    lamina::gradient_compressor<float> compressor(local.model(), worker_options_of(given, 0).compression);
    for (std::uint64_t step = 1; step <= steps + 1; ++step) {
      std::vector<std::size_t> others;
      for (std::size_t rank = deaf + 1; step == 2 && rank < ranks(); ++rank) others.push_back(rank);
      transport.receive_from_each(others);  // who are in their last step before it takes anything more
      apply_parameters(link.receive_parameters(), "the server", local, step);
      step_report report;
      if (step > steps) {
        link.finish(report);
        break;
      }
      tasks.compute(step, report);
      compressor.accumulate_all(local.gradients());
      link.push(report, payload(compressor.encode().to_bytes()));
      compressor.commit();
    }
    mine.parameters.push_back(parameters_of(local));
  } else {
    play(transport, given, who, mine);
  }
  std::vector<float> of_server = mine.parameters.back();
  check_mpi(MPI_Bcast(of_server.data(), static_cast<int>(of_server.size()), MPI_FLOAT, 0, MPI_COMM_WORLD),
            "MPI_Bcast");
  int is_equal = same_bits(mine.parameters.back(), of_server);
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &is_equal, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD), "MPI_Allreduce");
  REQUIRE(is_equal == 1);
}

TEST_CASE(
    "mpi: who has a message answers while others get theirs, and who does not take it holds up nobody") {
  if (ranks() < 3) return;
  constexpr std::size_t server = 0;
  const std::size_t late =
      GENERATE(std::size_t{1}, std::size_t{2});  // takes nothing until the other has been heard
  const std::size_t other = 3 - late;
  constexpr std::size_t long_bytes = std::size_t{4} << 20;  // more than MPI takes before the receiver asks
  mpi_transport transport(MPI_COMM_WORLD, {.max_message_bytes = long_bytes,
                                           .timeout_of = [](std::size_t) { return std::chrono::seconds(10); },
                                           .exchange_timeout = std::chrono::seconds(10),
                                           .name_of = name_of});
  const payload long_one{std::vector<std::byte>(long_bytes)};
  if (transport.rank() == server) {
    const std::array<std::size_t, 2> workers = {1, 2};
    transport.send(workers, message_kind::parameters, long_one);
    for (const message& each : transport.receive_from_each(workers)) REQUIRE(each.bytes.size() == long_bytes);
  } else if (transport.rank() == other) {
    REQUIRE(transport.receive_from_each({&server, 1})[0].bytes.size() == long_bytes);
    transport.send({&server, 1}, message_kind::gradients, long_one);
    transport.send({&late, 1}, message_kind::report, {});
  } else if (transport.rank() == late) {
    transport.receive_from_each({&other, 1});
    REQUIRE(transport.receive_from_each({&server, 1})[0].bytes.size() == long_bytes);
    transport.send({&server, 1}, message_kind::gradients, long_one);
  }
}

TEST_CASE("mpi: who waits for its turn hears that the sender lives") {
  if (ranks() != 3) return;
  constexpr std::size_t server = 0;
  constexpr std::size_t slow = 1;  // takes its pieces one by one, for longer than the other waits
  constexpr int pieces = 30;
  constexpr std::size_t piece_bytes = std::size_t{1} << 20;
  if (rank_of_this() == static_cast<int>(slow)) {
    // With MPI alone, which leaves it to this rank when a piece moves: the communicator is the transport's.
    MPI_Comm of_transport = MPI_COMM_NULL;
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &of_transport), "MPI_Comm_dup");
    mpi_announcement announced;
    check_mpi(MPI_Recv(&announced, sizeof announced, MPI_BYTE, 0, mpi_announcement_tag, of_transport,
                       MPI_STATUS_IGNORE),
              "MPI_Recv");
    std::vector<std::byte> piece(piece_bytes);
    for (int k = 0; k < pieces; ++k) {
      std::this_thread::sleep_for(std::chrono::milliseconds(80));
      check_mpi(MPI_Recv(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, 0, mpi_piece_tag,
                         of_transport, MPI_STATUS_IGNORE),
                "MPI_Recv");
    }
    check_mpi(MPI_Comm_free(&of_transport), "MPI_Comm_free");
    return;
  }
  mpi_transport transport(MPI_COMM_WORLD, {.max_message_bytes = pieces * piece_bytes,
                                           .timeout_of = [](std::size_t) { return std::chrono::seconds(1); },
                                           .exchange_timeout = std::chrono::seconds(1),
                                           .name_of = name_of,
                                           .life_period = std::chrono::milliseconds(250)});
  if (transport.rank() == server) {
    const std::array<std::size_t, 2> workers = {slow, 2};
    transport.send(workers, message_kind::parameters, payload{std::vector<std::byte>(pieces * piece_bytes)});
  } else {
    REQUIRE(transport.receive_from_each({&server, 1})[0].bytes.size() == pieces * piece_bytes);
  }
}

TEST_CASE("mpi: a message that goes slowly is progress to who waits for its end, and for the answer") {
  if (ranks() != 2) return;
  using clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds timeout(2);
  constexpr std::size_t taker = 1;
  constexpr int pieces = 5;
  constexpr std::size_t piece_bytes = std::size_t{1} << 20;
  constexpr int messages = 2;
  if (rank_of_this() == 0) {
    mpi_transport transport(MPI_COMM_WORLD, {.max_message_bytes = 0,
                                             .timeout_of = [&](std::size_t) { return timeout; },
                                             .exchange_timeout = timeout,
                                             .name_of = name_of});
    const payload long_one(std::vector<std::byte>(pieces * piece_bytes));
    const auto begin = clock::now();
    transport.begin_send(taker, message_kind::parameters, long_one);
    transport.begin_send(taker, message_kind::parameters, long_one);
    while (clock::now() - begin < timeout / 4) REQUIRE(!transport.look_for({&taker, 1}));
    transport.flush({&taker, 1});
    REQUIRE(clock::now() - begin > 2 * timeout);
    REQUIRE(transport.receive_from_any({&taker, 1}).kind == message_kind::report);
    REQUIRE(clock::now() - begin > 2 * timeout);
    return;
  }
  // With MPI alone, which leaves it to this rank when a piece moves: the communicator is the transport's.
  MPI_Comm of_transport = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &of_transport), "MPI_Comm_dup");
  mpi_announcement announced;
  std::vector<std::byte> piece(piece_bytes);
  for (int message = 0; message < messages; ++message) {
    check_mpi(MPI_Recv(&announced, sizeof announced, MPI_BYTE, 0, mpi_announcement_tag, of_transport,
                       MPI_STATUS_IGNORE),
              "MPI_Recv");
    for (int k = 0; k < pieces; ++k) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      check_mpi(MPI_Recv(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, 0, mpi_piece_tag,
                         of_transport, MPI_STATUS_IGNORE),
                "MPI_Recv");
    }
  }
  announced = {.kind = message_kind::report};
  check_mpi(MPI_Send(&announced, sizeof announced, MPI_BYTE, 0, mpi_announcement_tag, of_transport),
            "MPI_Send");
  check_mpi(MPI_Comm_free(&of_transport), "MPI_Comm_free");
}

TEST_CASE("mpi: an exchange has pieces below the eager limit, a message one way long ones") {
  if (ranks() != 2) return;
  constexpr std::size_t bytes = 2 * mpi_exchanged_piece_bytes + 1;
  const payload what(std::vector<std::byte>(bytes, std::byte{7}));
  if (rank_of_this() == 0) {
    constexpr std::size_t other = 1;
    mpi_transport transport(MPI_COMM_WORLD,
                            {.max_message_bytes = bytes,
                             .timeout_of = [](std::size_t) { return std::chrono::seconds(10); },
                             .exchange_timeout = std::chrono::seconds(10),
                             .name_of = name_of});
    const message came = transport.exchange(1, message_kind::report, what, 1);
    REQUIRE(came.bytes.size() == bytes);
    REQUIRE(std::ranges::all_of(came.bytes, [](std::byte each) { return each == std::byte{7}; }));
    transport.send({&other, 1}, message_kind::report, what);
    return;
  }
  // With MPI alone, which says what length each piece has: the communicator is the transport's.
  MPI_Comm of_transport = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &of_transport), "MPI_Comm_dup");
  const auto receive = [&] {
    mpi_announcement announced;
    check_mpi(MPI_Recv(&announced, sizeof announced, MPI_BYTE, 0, mpi_announcement_tag, of_transport,
                       MPI_STATUS_IGNORE),
              "MPI_Recv");
    std::vector<std::byte> piece(bytes);
    std::vector<int> lengths;
    for (std::size_t come = 0; come < announced.bytes; come += static_cast<std::size_t>(lengths.back())) {
      MPI_Status of_piece;
      check_mpi(MPI_Recv(piece.data(), static_cast<int>(bytes), MPI_BYTE, 0, mpi_piece_tag, of_transport,
                         &of_piece),
                "MPI_Recv");
      check_mpi(MPI_Get_count(&of_piece, MPI_BYTE, &lengths.emplace_back()), "MPI_Get_count");
    }
    return lengths;
  };
  const mpi_announcement own = {message_kind::report, bytes, bytes};
  check_mpi(MPI_Send(&own, sizeof own, MPI_BYTE, 0, mpi_announcement_tag, of_transport), "MPI_Send");
  const std::vector<std::byte> one_piece(bytes, std::byte{7});
  check_mpi(MPI_Send(one_piece.data(), static_cast<int>(bytes), MPI_BYTE, 0, mpi_piece_tag, of_transport),
            "MPI_Send");
  constexpr int full = mpi_exchanged_piece_bytes;
  CHECK(receive() == std::vector<int>{full, full, 1});
  CHECK(receive() == std::vector<int>{static_cast<int>(bytes)});
  check_mpi(MPI_Comm_free(&of_transport), "MPI_Comm_free");
}

TEST_CASE("mpi: a message in pieces of too few bytes, or of too many, is refused by name") {
  if (ranks() != 2) return;
  for (const std::size_t piece_bytes : {std::size_t{0}, mpi_exchanged_piece_bytes - 1, mpi_piece_bytes + 1}) {
    if (rank_of_this() == 0) {
      constexpr std::size_t other = 1;
      mpi_transport transport(MPI_COMM_WORLD,
                              {.max_message_bytes = 100,
                               .timeout_of = [](std::size_t) { return std::chrono::seconds(10); },
                               .exchange_timeout = std::chrono::seconds(10),
                               .name_of = name_of});
      REQUIRE_THROWS_WITH(transport.receive_from_any({&other, 1}),
                          name_of(1) + " announces a message in pieces of " + std::to_string(piece_bytes) +
                              " bytes, which are 60000 to 1048576");
      continue;
    }
    MPI_Comm of_transport = MPI_COMM_NULL;
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &of_transport), "MPI_Comm_dup");
    const mpi_announcement announced = {message_kind::report, piece_bytes, 100};
    check_mpi(MPI_Send(&announced, sizeof announced, MPI_BYTE, 0, mpi_announcement_tag, of_transport),
              "MPI_Send");
    check_mpi(MPI_Comm_free(&of_transport), "MPI_Comm_free");
  }
}

TEST_CASE("mpi: workers wait at the end for one that is slow as long as that is heard, timeout or not") {
  if (ranks() != 3) return;
  settings given = with_drop_ratio(0.7);
  given.asynchronous = true;
  given.timeout = std::chrono::seconds(2);
  given.delay = [](transport&, std::size_t worker, std::uint64_t) {
    if (worker == 0) std::this_thread::sleep_for(std::chrono::milliseconds(140));  // 3.5 s in all
  };
  const diaries run = run_over_mpi(given);
  if (rank_of_this() == 0) require_equal_ends(run);
}

TEST_CASE("in process: networks on another device than their parameters and gradients train the same") {
  if (rank_of_this() != 0) return;
  std::vector<settings> all(3, with_drop_ratio(0.7));
  all[1].workers_per_node = 2;
  all[2].by_allreduce = true;
  all[2].agreed = true;
  for (settings& each : all) {
    const diaries there = run_in_one_process(each, 3);
    each.mirrored = true;
    const diaries mirrored = run_in_one_process(each, 3);
    for (std::size_t step = 0; step <= steps; ++step) {
      REQUIRE(same_bits(there[0].parameters[step], mirrored[0].parameters[step]));
    }
  }
}

namespace {

// A share of each layer may be missing, of a network that loses every fifth packet; its layers have up to 18 chunks.
settings over_lossy_network(settings given, std::uint32_t bound_up_ppm, std::uint32_t bound_down_ppm) {
  given.width = 512;
  given.lossy.is_lossy = true;
  given.lossy.bound_up_ppm = bound_up_ppm;
  given.lossy.bound_down_ppm = bound_down_ppm;
  given.network = {
      .loss = 0.2, .seed = 5, .most_bound_up_ppm = bound_up_ppm, .most_bound_down_ppm = bound_down_ppm};
  return given;
}

transfer_metrics transfers_of(const diaries& run) {
  transfer_metrics all;
  for (const step_metrics& step : run[0].metrics) {
    if (!step.transfers) continue;
    all.up += step.transfers->up;
    all.down += step.transfers->down;
  }
  return all;
}

}  // namespace

TEST_CASE("in process: with a bound of 0 a network that loses packets changes nothing, to the last bit") {
  if (rank_of_this() != 0) return;
  std::vector<settings> all(6, with_drop_ratio(0.7));
  all[1].agreed = true;
  all[2].compression.payload = lamina::payload_type::int8;
  all[2].optimizer.momentum = 0.9F;
  all[3].asynchronous = true;
  all[4].workers_per_node = 2;
  all[5].compression.part_elements = 4096;
  all[5].compression.momentum = 0.9;
  for (std::size_t i = 0; i < all.size(); ++i) {
    INFO("settings " << i);
    all[i].width = 512;
    const diaries whole = run_in_one_process(all[i], 3);
    const diaries lossy = run_in_one_process(over_lossy_network(all[i], 0, 0), 3);
    require_equal_runs(whole, lossy);
    CHECK(!whole[0].metrics[0].transfers);
    const auto [up, down] = transfers_of(lossy);
    const bool is_int8 = all[i].compression.payload == lamina::payload_type::int8;
    for (const auto& [each, chunk] : {std::pair(up, is_int8 ? 1344 : 352), std::pair(down, 352)}) {
      CHECK(each.lost_elements == 0);
      CHECK(each.repeated > 10);
      CHECK(each.rounds > 1);
      // Once each chunk of a frame, of which at most one of a layer is shorter.
      const auto whole_chunks = each.elements / static_cast<std::uint64_t>(chunk);
      const std::uint64_t once = each.packets - each.repeated;
      CHECK(once >= whole_chunks);
      CHECK(once <= whole_chunks + 3 * 5 * steps);
      CHECK(each.wire_bytes > each.elements * (chunk == 1344 ? 1 : 4));
      CHECK(each.wire_bytes <= 1506 * each.packets);
    }
  }
}

TEST_CASE(
    "in process: a run that loses some of its frames repeats to the bit, and ends with equal replicas") {
  if (rank_of_this() != 0) return;
  std::vector<settings> all(5, over_lossy_network(with_drop_ratio(0.7), 200'000, 200'000));
  all[1].network.stop = lamina::bounded::stop_policy::on_probe;
  all[2].asynchronous = true;
  all[3].compression.payload = lamina::payload_type::int8;
  all[3].compression.max_age = 5;
  all[4].compression.part_elements = 4096;
  for (std::size_t i = 0; i < all.size(); ++i) {
    INFO("settings " << i);
    const settings& given = all[i];
    const diaries run = run_in_one_process(given, 3);
    require_equal_runs(run, run_in_one_process(given, 3));
    require_equal_ends(run);
    const auto [up, down] = transfers_of(run);
    CHECK(up.lost_share() > 0.02);
    CHECK(up.lost_share() <= 0.2);
    CHECK(down.lost_share() > 0.01);
    CHECK(down.lost_share() <= 0.2);
    const bool is_eager = given.network.stop == lamina::bounded::stop_policy::eager;
    CHECK((up.late + down.late > 0) == is_eager);  // nothing overtakes

    settings other = given;
    other.network.seed = 6;
    const diaries elsewhere = run_in_one_process(other, 3);
    CHECK(!same_bits(elsewhere[0].parameters.back(), run[0].parameters.back()));
    if (given.asynchronous) continue;
    // Replicas may lack some of the parameters in between, and where they are compared they do not.
    const training_plan plan = plan_of(given);
    std::size_t different = 0;
    for (std::size_t step = 1; step <= steps + 1; ++step) {
      const bool is_same = same_bits(run[1].parameters[step - 1], run[0].parameters[step - 1]);
      INFO("step " << step);
      if (plan.bound_down_before(step) == 0) CHECK(is_same);
      if (is_same) continue;
      ++different;
      const std::vector<float>& now = run[1].parameters[step - 1];
      std::size_t others = 0;  // neither the server's nor what the worker had
      for (std::size_t k = 0; k < now.size(); ++k) {
        if (now[k] != run[0].parameters[step - 1][k] && now[k] != run[1].parameters[step - 2][k]) ++others;
      }
      CHECK(others == 0);
    }
    CHECK(different > 5);
    CHECK(plan.bound_down_before(1) == 0);
    CHECK(plan.bound_down_before(2) == 200'000);
    CHECK(plan.bound_down_before(8) == 0);   // evaluated
    CHECK(plan.bound_down_before(11) == 0);  // compared
    CHECK(plan.bound_down_before(steps + 1) == 0);
  }
}

TEST_CASE(
    "in process: gradients that were lost arrive later, at most three sends, and are gone where that is "
    "wanted") {
  if (rank_of_this() != 0) return;
  // Half of the packets: many chunks would be lost a fourth time, if they were not required then.
  settings given = over_lossy_network(with_drop_ratio(0), 500'000, 0);
  given.network.loss = 0.5;
  given.fixed_gradients = true;
  given.optimizer.learning_rate = 0x1p-4F;  // sums are exact
  given.network.stop = lamina::bounded::stop_policy::on_probe;
  constexpr std::size_t workers = 1;
  settings whole = given;
  whole.lossy = {};
  const history expected = run_in_one_process(whole, workers)[0].parameters;
  // The gradients of three steps in a row, which may still wait in the residual: those of a step are one, two or three units.
  constexpr float waiting = 0x1p-10F * 6 * 0x1p-4F;
  for (const bool returns_lost : {true, false}) {
    INFO("returned " << returns_lost);
    given.lossy.returns_lost = returns_lost;
    const diaries run = run_in_one_process(given, workers);
    CHECK(transfers_of(run).up.lost_share() > 0.05);
    std::size_t delayed = 0;
    std::size_t gone = 0;
    for (std::size_t step = 0; step <= steps; ++step) {
      for (std::size_t i = 0; i < expected[step].size(); ++i) {
        const float missing = run[0].parameters[step][i] - expected[step][i];
        REQUIRE(missing >= 0);
        if (missing > 0) ++delayed;
        if (missing > waiting) ++gone;
      }
    }
    CHECK(delayed > 0);
    if (returns_lost) {
      CHECK(gone == 0);
    } else {
      CHECK(gone > expected[0].size());
    }
  }
}

TEST_CASE("in process: bounds grow from zero, and a receiver agrees to no larger one than its own") {
  if (rank_of_this() != 0) return;
  settings given = over_lossy_network(with_drop_ratio(0.7), 400'000, 0);
  given.lossy.warm_up_steps = 10;
  const diaries run = run_in_one_process(given, 2);
  CHECK(run[0].metrics[0].transfers->up.lost_elements == 0);  // 4 % of 18 chunks are none
  CHECK(run[0].metrics[20].transfers->up.lost_elements > 0);
  CHECK(given.lossy.bound_up(5) == 200'000);
  CHECK(given.lossy.bound_up(10) == 400'000);

  given.network.most_bound_up_ppm = 300'000;
  CHECK_THROWS_WITH(run_in_one_process(given, 2),
                    Catch::Matchers::Contains("a transfer to the server has failed"));
}

TEST_CASE("in process: nothing is owed where nothing can be lost") {
  if (rank_of_this() != 0) return;
  const auto body = [](transport& ranks) {
    constexpr std::size_t server = 0;
    constexpr std::size_t worker = 1;
    if (ranks.rank() == worker) {
      const message arrived = ranks.receive_from_each({&server, 1})[0];
      CHECK(arrived.bytes.size() == 5);
      CHECK(arrived.transfer == nullptr);
      return;
    }
    const outgoing_frame frame{.frame = payload(std::vector<std::byte>(3)),
                               .behind = payload(std::vector<std::byte>(2))};
    const std::array required = {lamina::bounded::chunk{}};
    const lamina::bounded::obligations owed{.required = required};
    CHECK_THROWS_AS(ranks.send_frame({&worker, 1}, message_kind::parameters, frame, {&owed, 1}),
                    std::logic_error);
    const std::vector<sent_frame> sent = ranks.send_frame({&worker, 1}, message_kind::parameters, frame);
    REQUIRE(sent.size() == 1);
    CHECK(!sent[0].arrived);
  };
  run_in_process(2, body, {.name_of = name_of, .on_death = {}});
}

TEST_CASE("in process: an exception of one ends all and comes out") {
  if (rank_of_this() != 0) return;
  const auto run = [](std::size_t workers, const std::function<void(transport&)>& server,
                      const std::function<void(transport&)>& worker) {
    const auto body = [&](transport& ranks) { ranks.rank() == 0 ? server(ranks) : worker(ranks); };
    run_in_process(workers + 1, body, {.name_of = name_of, .on_death = {}});
  };
  constexpr std::size_t server = 0;
  constexpr std::array<std::size_t, 3> workers = {1, 2, 3};
  const auto waits = [&](transport& ranks) { ranks.receive_from_each({&server, 1}); };
  CHECK_THROWS_WITH(run(
                        3, [](transport&) { throw std::runtime_error("no"); }, waits),
                    "no");
  CHECK_THROWS_WITH(run(
                        3, [&](transport& ranks) { ranks.receive_from_each(workers); },
                        [&](transport& ranks) {
                          if (ranks.rank() == 2) throw std::runtime_error("worker 1 is ill");
                          waits(ranks);
                        }),
                    "worker 1 is ill");
  CHECK_THROWS_WITH(
      run(
          2, [&](transport& ranks) { ranks.receive_from_any(std::span(workers).first(2)); }, waits),
      "the ranks wait for each other");
  CHECK_THROWS_WITH(run(
                        3, [&](transport& ranks) { ranks.receive_from_each(workers); },
                        [&](transport& ranks) {
                          if (ranks.rank() == 2) ranks.send({&server, 1}, message_kind::report, {});
                        }),
                    "waiting for worker 0 and worker 2: gone before the end");
}

// Plays a worker that answers the server's first frame with `bytes`; what the server says to that.
std::string complaint_about(const std::function<std::vector<std::byte>(const lamina::layout&)>& make_bytes) {
  const settings given = with_drop_ratio(0.7);
  const auto body = [&](transport& ranks) {
    if (ranks.rank() == 0) {
      diary seen;
      play_server(ranks, given, flat_topology(1), seen);
      return;
    }
    worker_link link(ranks, 0);
    const payload made(make_bytes(make_replica(0, given).model()));
    for (int time = 0; time < 2; ++time) {  // the same again in the next step
      link.receive_parameters();
      link.push({}, made);
    }
    link.receive_parameters();
  };
  try {
    run_in_process(2, body, {.name_of = name_of, .on_death = {}});
  } catch (const link_error& error) {
    return error.what();
  }
  return "no complaint";
}

std::vector<std::byte> frame_of(const lamina::layout& model) {
  lamina::gradient_compressor<float> compressor(model);
  for (std::size_t l = 0; l < model.layers(); ++l)
    compressor.accumulate(l, std::vector<float>(model.sizes()[l], 1.0F));
  return compressor.encode().to_bytes();
}

TEST_CASE("in process: a frame that is damaged, cut, replayed or of another model ends the run by name") {
  if (rank_of_this() != 0) return;
  const auto blame = [](const std::string& what) { return "worker 0 sent a bad frame: " + what; };
  CHECK_THAT(complaint_about([](const lamina::layout& model) {
               auto bytes = frame_of(model);
               bytes.back() ^= std::byte{1};
               return bytes;
             }),
             Catch::StartsWith(blame("checksum mismatch")));
  CHECK_THAT(complaint_about([](const lamina::layout& model) {
               auto bytes = frame_of(model);
               bytes.resize(bytes.size() - 1);
               return bytes;
             }),
             Catch::StartsWith(blame("frame is truncated")));
  CHECK_THAT(complaint_about(frame_of), Catch::StartsWith(blame("")) && Catch::Contains("step"));
  CHECK_THAT(complaint_about([](const lamina::layout&) {
               return frame_of(lamina::layout({{"another", {7}}}));
             }),
             Catch::StartsWith(blame("")) && Catch::Contains("layout"));
}

TEST_CASE("in process: a member of a node that sends other than its gradients ends the run by name") {
  if (rank_of_this() != 0) return;
  const settings given = with_drop_ratio(0.7);
  const topology who = hybrid_topology(2, 2);
  const auto complaint_about = [&](std::ptrdiff_t bytes_more) -> std::string {
    const auto body = [&](transport& ranks) {
      diary seen;
      if (who.is_server(ranks.rank())) return play_server(ranks, given, who, seen);
      if (who.worker_on(ranks.rank()) == 0) return play_worker(ranks, given, who, seen);
      worker_link leader(ranks, who.nodes[0][0]);
      leader.receive_parameters();
      const auto whole =
          static_cast<std::ptrdiff_t>(make_replica(0, given).model().elements() * sizeof(float));
      leader.push({.images = 1},
                  payload(std::vector<std::byte>(static_cast<std::size_t>(whole + bytes_more))));
      leader.receive_parameters();
      throw std::runtime_error("its gradients were taken");
    };
    try {
      run_in_process(3, body, {.name_of = name_of, .on_death = {}});
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "no complaint";
  };
  CHECK_THAT(complaint_about(-4),
             Catch::StartsWith("worker 1 sent ") && Catch::Contains(" bytes of gradients in step 1, not "));
  CHECK_THAT(complaint_about(4), Catch::StartsWith("worker 1 sent "));
  CHECK(complaint_about(0) == "its gradients were taken");
}

TEST_CASE("in process: a replica that differs ends the run, and the worker is named") {
  if (rank_of_this() != 0) return;
  for (const std::size_t workers_per_node : {1, 2, 3}) {
    for (std::size_t bad = 0; bad < 3; ++bad) {
      settings given = with_drop_ratio(0.7);
      given.workers_per_node = workers_per_node;
      given.hash_period_steps = 3;
      given.meddle = [&](std::size_t worker, std::uint64_t step, replica& local) {
        if (worker == bad && step == 4) local[0][0] += 1e-3F;
      };
      INFO("worker " << bad << ", nodes of " << workers_per_node);
      // A leader hears its members before the server hears it: seen from a bad one, all of them differ.
      const bool leads = bad % workers_per_node == 0 && bad + 1 < 3 && workers_per_node > 1;
      const std::size_t named = leads ? bad + 1 : bad;
      CHECK_THROWS_WITH(
          run_in_one_process(given, 3),
          "worker " + std::to_string(named) + " began step 4 with other parameters than it was sent");
    }
  }
}

TEST_CASE(
    "in process: a replica that differs at the end of an asynchronous run ends it, and the worker is named") {
  if (rank_of_this() != 0) return;
  settings given = with_drop_ratio(0.7);
  given.asynchronous = true;
  given.meddle = [](std::size_t worker, std::uint64_t step, replica& local) {
    if (worker == 1 && step > steps) local[0][0] += 1e-3F;
  };
  CHECK_THROWS_WITH(run_in_one_process(given, 3), "worker 1 began step " + std::to_string(steps + 1) +
                                                      " with other parameters than it was sent");
}

TEST_CASE("in process: a degraded run goes on at the mean over the workers that are left") {
  if (rank_of_this() != 0) return;
  constexpr std::uint64_t last_step = 10;  // of worker 1
  for (const bool agreed : {false, true}) {
    settings given = with_drop_ratio(agreed ? 0.7 : 0);
    given.agreed = agreed;  // whose means are over those that are left, too
    given.meddle = [](std::size_t worker, std::uint64_t step, replica&) {
      if (worker == 1 && step == last_step + 1) throw std::runtime_error("worker 1 is dead");
    };
    CHECK_THROWS_WITH(run_in_one_process(given, 3), "worker 1 is dead");

    std::vector<std::string> losses;
    given.losses = &losses;
    const diaries run = run_in_one_process(given, 3);
    REQUIRE(losses == std::vector<std::string>{"waiting for worker 1: gone before the end"});
    REQUIRE(run[0].metrics.size() == steps);
    for (std::size_t step = 0; step <= steps; ++step) {
      for (const std::size_t rank : {1, 3}) {
        REQUIRE(same_bits(run[rank].parameters[step], run[0].parameters[step]));
      }
    }
    if (agreed) continue;
    std::vector<float> x = run[0].parameters.front();
    for (std::size_t step = 0; step < steps; ++step) {
      const bool all_live = step < last_step;
      for (std::size_t i = 0; i < x.size(); ++i) {
        float sum = run[1].gradients[step][i];
        if (all_live) sum += run[2].gradients[step][i];
        sum += run[3].gradients[step][i];
        x[i] -= 0.05F * (sum / (all_live ? 3.0F : 2.0F));
      }
      INFO("step " << step + 1);
      REQUIRE(same_bits(x, run[0].parameters[step + 1]));
    }
  }
}

struct normalised_impl : torch::nn::Module {
  normalised_impl()
      : linear(register_module("linear", torch::nn::Linear(features, classes))),
        norm(register_module("norm", torch::nn::BatchNorm1d(classes))) {}
  torch::Tensor forward(const torch::Tensor& x) { return norm->forward(linear->forward(x)); }
  torch::nn::Linear linear;
  torch::nn::BatchNorm1d norm;
};
TORCH_MODULE_IMPL(normalised, normalised_impl);

TEST_CASE(
    "in process: merged workers get the mean of residuals and statistics, and the same place in the data") {
  if (rank_of_this() != 0) return;
  torch::set_num_threads(1);
  replica local{torch::nn::AnyModule(normalised())};
  const auto images = open_data("synthetic", {.image_size_pixels = 8, .seed = 1}).train;
  std::vector<std::vector<std::byte>> states;
  std::vector<std::vector<float>> residuals;
  for (const float value : {1.0F, 4.0F}) {
    lamina::gradient_compressor<float> compressor(local.model(), {.drop_ratio = 0.9});
    for (std::size_t l = 0; l < local.model().layers(); ++l) {
      compressor.accumulate(l,
                            std::vector<float>(local.model().sizes()[l], value * static_cast<float>(l + 1)));
    }
    compressor.encode();
    compressor.commit();
    residuals.push_back(flatten(local.model(), [&](std::size_t l) { return compressor.residual()[l]; }));
    std::vector<torch::Tensor> statistics = local.statistics();
    statistics[0].fill_(value);
    local.set_statistics(statistics);
    batch_stream batches(images, {2, states.size()}, 4, 1, {.epochs = 1, .batches = 6});
    states.push_back(
        pack(std::vector<std::vector<std::byte>>{compressor.save(), save_worker(local, batches)}));
  }
  REQUIRE(residuals[0] != residuals[1]);

  const auto merged = merge_workers(states, 4, local);
  REQUIRE(merged.size() == 4);
  for (const auto& each : merged) {
    const auto parts = unpack(each);
    lamina::gradient_compressor<float> compressor(local.model(), {.drop_ratio = 0.9});
    compressor.load(parts.at(0));
    const auto residual = flatten(local.model(), [&](std::size_t l) { return compressor.residual()[l]; });
    for (std::size_t i = 0; i < residual.size(); ++i) {
      REQUIRE(residual[i] == (residuals[0][i] + residuals[1][i]) / 2);
    }
    const batch_stream::position taken = load_worker(parts.at(1), local);
    REQUIRE(taken.epochs == 1);
    REQUIRE(taken.batches == 3);
    REQUIRE(local.statistics()[0].eq(2.5F).all().item<bool>());
  }
  auto other = states;
  other[1] = pack(std::vector<std::vector<std::byte>>{{}, {}});
  CHECK_THROWS_WITH(merge_workers(other, 4, local),
                    "the checkpoint holds no state of a worker of this model");
}

int main(int argc, char** argv) {
  const mpi_session session(argc, argv);
  torch::set_num_threads(1);
  const int failures = Catch::Session().run(argc, argv);
  // One rank that fails must not leave the others waiting for the next test case.
  if (failures != 0) MPI_Abort(MPI_COMM_WORLD, 1);
  return 0;
}
