// SPDX-License-Identifier: MIT
// Runs the loops of examples/resnet50_ps on a small model, under mpirun with any number of workers and in one process.
// Every rank passes through the same test cases in the same order; only rank 0 asserts.
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/utils.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <functional>
#include <lamina/worker.hpp>
#include <string>
#include <vector>

#include "in_process_link.hpp"
#include "mpi_link.hpp"
#include "replica.hpp"
#include "server.hpp"
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

std::size_t ranks() {
  int count = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &count), "MPI_Comm_size");
  return static_cast<std::size_t>(count);
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

struct settings {
  lamina::compressor_options compression;
  sgd_options optimizer = {.learning_rate = 0.05F};
  bool agreed = false;
  bool asynchronous = false;
};

// What the server, or a worker, saw.
struct diary {
  history
      parameters;  // at the beginning of each step and at the end: steps + 1; of the asynchronous server at the ends
  history gradients;                  // of each step; the server has none
  std::vector<step_metrics> metrics;  // of the server
};

// Each begins with parameters of its own: the server's first frame must replace the workers'.
replica make_replica(std::size_t seed, const settings& given) {
  torch::manual_seed(100 + seed);
  return replica{torch::nn::AnyModule(two_layers()), given.compression.part_elements};
}

std::vector<float> parameters_of(const replica& local) {
  return flatten(local.model(), [&](std::size_t l) { return local[l]; });
}

diary play_server(server_link& link, const settings& given) {
  const replica local = make_replica(0, given);
  diary seen;
  seen.parameters.push_back(parameters_of(local));
  const server_options options = {
      .steps = steps,
      .optimizer = given.optimizer,
      .learning_rate = learning_rate_schedule(given.optimizer.learning_rate, constant_rate{}, 0),
      .resume = {}};
  const server_tasks tasks = {.record =
                                  [&](const step_metrics& step) {
                                    seen.parameters.push_back(parameters_of(local));
                                    seen.metrics.push_back(step);
                                  },
                              .record_evaluation = {},
                              .save = {}};
  (given.asynchronous ? serve_asynchronously : serve)(
      link, local.model(), [&](std::size_t l) { return local[l]; }, options, tasks);
  return seen;
}

diary play_worker(worker_link& link, const settings& given) {
  replica local = make_replica(1 + link.worker(), given);
  diary seen;
  auto random = at::make_generator<at::CPUGeneratorImpl>(link.worker());
  const worker_tasks tasks = {
      .next_batch =
          [&] {
            const torch::Tensor images = torch::randn({8, features}, random);
            return batch_stream::batch(images, images.slice(1, 0, classes).argmax(1));
          },
      .evaluate = {},
      .pulled =
          [&](std::uint64_t step) {
            seen.parameters.push_back(parameters_of(local));
            if (step == 1) return;  // the gradients of the step before still stand in the tensors
            const auto gradients = local.gradients();
            seen.gradients.push_back(flatten(local.partition.model(), [&](std::size_t l) {
              return lamina::elements_of<float>(gradients[l]);
            }));
          },
      .save = {},
      .load = {}};
  worker_options options = {
      .steps = steps, .compression = given.compression, .agrees_on_selection = given.agreed};
  options.compression.sender = static_cast<std::uint32_t>(link.worker());
  options.hash_period_steps = given.asynchronous ? 0 : 10;
  work(link, local, tasks, options);
  return seen;
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

diaries run_over_mpi(const settings& given) {
  static const MPI_Comm workers = [] {
    MPI_Comm all = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(MPI_COMM_WORLD, rank_of_this() == 0 ? MPI_UNDEFINED : 0, rank_of_this(), &all),
              "MPI_Comm_split");
    return all;
  }();
  const mpi_link_options options = {.max_message_bytes = 1 << 20, .timeout = std::chrono::seconds(60)};
  diary mine;
  if (rank_of_this() == 0) {
    mpi_server_link link(MPI_COMM_WORLD, options);
    mine = play_server(link, given);
  } else {
    mpi_worker_link link(MPI_COMM_WORLD, workers, options);
    mine = play_worker(link, given);
  }
  const std::size_t elements = mine.parameters.front().size();
  const auto parameters = gather(mine.parameters, steps + 1, elements);
  const auto gradients = gather(mine.gradients, steps, elements);
  diaries all(ranks());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    all[rank].parameters = parameters[rank];
    if (rank > 0) all[rank].gradients = gradients[rank];
  }
  all[0].metrics = mine.metrics;
  return all;
}

diaries run_in_one_process(const settings& given, std::size_t workers) {
  diaries all(workers + 1);
  run_in_process(
      workers, [&](server_link& link) { all[0] = play_server(link, given); },
      [&](worker_link& link) { all[link.worker() + 1] = play_worker(link, given); });
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
  std::vector<settings> all(6, with_drop_ratio(0.7));
  all[1].agreed = true;
  all[2].compression.byte_budget = 0.2;
  all[3].compression.payload = lamina::payload_type::int8;
  all[3].optimizer.momentum = 0.9F;
  all[4].compression.momentum = 0.9;
  all[4].compression.warm_up_steps = 10;
  all[5].asynchronous = true;
  for (std::size_t i = 0; i < all.size(); ++i) {
    // The order in which frames reach an asynchronous server differs from run to run, but for a single worker.
    if (all[i].asynchronous && ranks() > 2) continue;
    const diaries over_mpi = run_over_mpi(all[i]);
    if (rank_of_this() != 0) continue;
    INFO("settings " << i);
    require_equal_runs(over_mpi, run_in_one_process(all[i], ranks() - 1));
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

TEST_CASE("mpi: an asynchronous server with one worker is the synchronous one") {
  if (ranks() > 2) return;
  settings given = with_drop_ratio(0.7);
  const diaries synchronous = run_over_mpi(given);
  given.asynchronous = true;
  const diaries asynchronous = run_over_mpi(given);
  if (rank_of_this() == 0) require_equal_runs(synchronous, asynchronous);
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
  }
  // In turn, each frame has seen all but those of the other workers in between.
  for (std::size_t i = 1; i < steps; ++i) {
    REQUIRE(in_process[0].metrics[i].staleness == static_cast<double>(workers - 1));
  }
}

TEST_CASE("in process: an exception of one ends all and comes out") {
  if (rank_of_this() != 0) return;
  const auto waits = [](worker_link& link) { link.receive(); };
  CHECK_THROWS_WITH(run_in_process(
                        3, [](server_link&) { throw std::runtime_error("no"); }, waits),
                    "no");
  CHECK_THROWS_WITH(run_in_process(
                        3, [](server_link& link) { link.receive_from_all(); },
                        [&](worker_link& link) {
                          if (link.worker() == 1) throw std::runtime_error("worker 1 is ill");
                          waits(link);
                        }),
                    "worker 1 is ill");
  CHECK_THROWS_AS(run_in_process(
                      2, [](server_link& link) { link.receive_from_any(); }, waits),
                  link_error);
}

// Plays a worker that answers the server's first frame with `bytes`; what the server says to that.
template <class Error>
std::string complaint_about(const std::function<std::vector<std::byte>(const lamina::layout&)>& make_bytes) {
  const settings given = with_drop_ratio(0.7);
  try {
    run_in_process(
        1, [&](server_link& link) { play_server(link, given); },
        [&](worker_link& link) {
          link.receive();
          const std::vector<std::byte> made = make_bytes(make_replica(0, given).model());
          const std::span<const std::byte> bytes = made;
          link.send({}, std::span(&bytes, 1));
          link.receive();
          link.send({}, std::span(&bytes, 1));  // the same again, in the next step
          link.receive();
        });
  } catch (const Error& error) {
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
  using lamina::decode_error;
  CHECK_THAT(complaint_about<decode_error>([](const lamina::layout& model) {
               auto bytes = frame_of(model);
               bytes.back() ^= std::byte{1};
               return bytes;
             }),
             Catch::Contains("checksum"));
  CHECK_THAT(complaint_about<decode_error>([](const lamina::layout& model) {
               auto bytes = frame_of(model);
               bytes.resize(bytes.size() - 1);
               return bytes;
             }),
             !Catch::Contains("no complaint"));
  CHECK_THAT(complaint_about<decode_error>([](const lamina::layout& model) { return frame_of(model); }),
             Catch::Contains("step"));
  CHECK_THAT(complaint_about<decode_error>([](const lamina::layout&) {
               return frame_of(lamina::layout({{"another", {7}}}));
             }),
             Catch::Contains("layout"));
}

TEST_CASE("in process: a replica that differs ends the run, and the worker is named") {
  if (rank_of_this() != 0) return;
  const settings given = with_drop_ratio(0.7);
  const auto drift = [&](worker_link& link) {
    replica local = make_replica(1 + link.worker(), given);
    const worker_tasks tasks = {
        .next_batch =
            [] {
              return batch_stream::batch(torch::ones({8, features}), torch::zeros({8}, torch::kLong));
            },
        .evaluate = {},
        .pulled =
            [&](std::uint64_t step) {
              if (link.worker() == 1 && step == 4) local[0][0] += 1e-3F;
            },
        .save = {},
        .load = {}};
    worker_options options = {.steps = steps, .compression = given.compression};
    options.compression.sender = static_cast<std::uint32_t>(link.worker());
    options.hash_period_steps = 3;
    work(link, local, tasks, options);
  };
  CHECK_THROWS_WITH(run_in_process(
                        2, [&](server_link& link) { play_server(link, given); }, drift),
                    "worker 1 began step 4 with other parameters than the server's");
}

int main(int argc, char** argv) {
  const mpi_session session(argc, argv);
  torch::set_num_threads(1);
  const int failures = Catch::Session().run(argc, argv);
  // One rank that fails must not leave the others waiting for the next test case.
  if (failures != 0) MPI_Abort(MPI_COMM_WORLD, 1);
  return 0;
}
