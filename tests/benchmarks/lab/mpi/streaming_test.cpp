// SPDX-License-Identifier: MIT
// A server that takes steps in parts changes nothing: runs of a small network over MPI, and in one process, against those whose frames
// are whole, bit for bit. Every rank passes through the same test cases in the same order.
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/topology.hpp"
#include "loops/streaming.hpp"
#include "messages/in_process_transport.hpp"
#include "messages/mpi_transport.hpp"
#include "model/passes.hpp"
#include "model/replica.hpp"

#define CATCH_CONFIG_RUNNER
#include "catch.hpp"
#include "gated_network.hpp"
#include "world.hpp"

namespace {

using namespace lab;

constexpr std::uint64_t steps = 25;

struct settings {
  lamina::compressor_options compression = {.drop_ratio = 0.7, .decide = lamina::decision_timing::as_ready};
  sgd_options optimizer = {.learning_rate = 0.05F, .momentum = 0.9F, .weight_decay = 0.01F, .nesterov = true};
  streaming_options streaming = {};
  std::uint64_t evaluation_period_steps = 7;
  std::uint64_t checkpoint_period_steps = 0;
  std::uint64_t steps_done = 0;
  server_state from = {};              // of the server
  std::vector<float> parameters = {};  // likewise
};

struct diary {
  std::vector<std::vector<float>> parameters;  // of the server, after each step
  std::vector<float> at_end;                   // of this rank
  std::vector<step_metrics> metrics;
  std::map<std::uint64_t, evaluation> evaluations;
  std::vector<server_state> saved;
};

// Counts what a worker sends, and may look at what it receives.
struct tap {
  std::size_t parts = 0;  // of gradients, but for the last of each step
  std::size_t parts_of_parameters = 0;
};

class tapped_transport : public transport {
 public:
  tapped_transport(transport& inner, tap& counts) : inner_(inner), counts_(counts) {}
  std::size_t rank() const override { return inner_.rank(); }
  std::size_t ranks() const override { return inner_.ranks(); }
  std::string name_of(std::size_t rank) const override { return inner_.name_of(rank); }
  void send(std::span<const std::size_t> to, message_kind kind, const payload& what) override {
    inner_.send(to, kind, what);
  }
  void begin_send(std::size_t to, message_kind kind, const payload& what) override {
    if (kind == message_kind::part) ++counts_.parts;
    inner_.begin_send(to, kind, what);
  }
  void flush(std::span<const std::size_t> to) override { inner_.flush(to); }
  std::optional<message> look_for(std::span<const std::size_t> from) override {
    std::optional<message> found = inner_.look_for(from);
    if (found) note(*found);
    return found;
  }
  std::vector<message> receive_from_each(std::span<const std::size_t> from) override {
    std::vector<message> all = inner_.receive_from_each(from);
    for (const message& each : all) note(each);
    return all;
  }
  message receive_from_any(std::span<const std::size_t> from) override {
    return inner_.receive_from_any(from);
  }
  message exchange(std::size_t to, message_kind kind, const payload& what, std::size_t from) override {
    return inner_.exchange(to, kind, what, from);
  }

 private:
  void note(const message& each) {
    if (each.kind == message_kind::parameters) ++counts_.parts_of_parameters;
  }

  transport& inner_;
  tap& counts_;
};

diary train_on(transport& over, const settings& given) {
  torch::manual_seed(100);
  replica local{torch::nn::AnyModule(network()), given.compression.part_elements};
  const float* parameter = given.parameters.data();
  for (std::size_t l = 0; l < local.model().layers() && !given.parameters.empty();
       parameter += local[l++].size())
    std::copy_n(parameter, local[l].size(), local[l].begin());
  const training_plan plan = {.steps = steps,
                              .steps_done = given.steps_done,
                              .evaluation_period_steps = given.evaluation_period_steps,
                              .hash_period_steps = 10,
                              .checkpoint_period_steps = given.checkpoint_period_steps};
  diary seen;
  if (over.rank() == 0) {
    const server_tasks tasks = {
        .records = {.record =
                        [&](const step_metrics& step) {
                          seen.parameters.push_back(parameters_of(local));
                          seen.metrics.push_back(step);
                        },
                    .record_evaluation = [&](std::uint64_t step,
                                             const evaluation& whole) { seen.evaluations[step] = whole; }},
        .updated = {},
        .save = [&](const server_state& state) { seen.saved.push_back(state); }};
    const server_options options = {
        .plan = plan,
        .optimizer = given.optimizer,
        .learning_rate = learning_rate_schedule(given.optimizer.learning_rate, {}, 4)};
    std::vector<client> clients;
    for (std::size_t rank = 1; rank < over.ranks(); ++rank) clients.push_back({.rank = rank});
    server_link workers(over, clients);
    if (given.streaming.is_in_parts) {
      serve_in_parts(workers, local, options, given.streaming, tasks, given.from);
    } else {
      serve(workers, local, options, tasks, given.from);
    }
  } else {
    const auto random =
        std::make_shared<at::Generator>(at::make_generator<at::CPUGeneratorImpl>(7 + over.rank()));
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
    worker_options options = {.plan = plan, .compression = given.compression};
    options.compression.sender = static_cast<std::uint32_t>(over.rank() - 1);
    worker_link server(over, 0);
    work_as_ready(server, local, tasks, options, given.streaming);
  }
  seen.at_end = parameters_of(local);
  return seen;
}

diary train(const settings& given, tap* counts = nullptr) {
  const topology who = flat_topology(ranks() - 1);
  mpi_transport transport(MPI_COMM_WORLD, {.max_message_bytes = 1 << 22,
                                           .timeout_of = [](std::size_t) { return std::chrono::seconds(60); },
                                           .exchange_timeout = std::chrono::seconds(60),
                                           .name_of = [&](std::size_t rank) { return who.name_of(rank); }});
  if (counts == nullptr) return train_on(transport, given);
  tapped_transport tapped(transport, *counts);
  return train_on(tapped, given);
}

// That of the server.
diary train_in_process(const settings& given) {
  diary seen;
  run_in_process(
      ranks(),
      [&](transport& over) {
        diary own = train_on(over, given);
        if (over.rank() == 0) seen = std::move(own);
      },
      {.name_of = [](std::size_t rank) { return "rank " + std::to_string(rank); }, .on_death = {}});
  return seen;
}

void require_equal_runs(const diary& a, const diary& b) {
  REQUIRE(same_bits(a.at_end, b.at_end));
  if (rank_of_this() != 0) return;
  REQUIRE(a.parameters.size() == steps);
  REQUIRE(b.parameters.size() == steps);
  for (std::size_t step = 0; step < steps; ++step) {
    INFO("after step " << step + 1);
    REQUIRE(same_bits(a.parameters[step], b.parameters[step]));
    REQUIRE(a.metrics[step].learning_rate == b.metrics[step].learning_rate);
    REQUIRE(a.metrics[step].loss == b.metrics[step].loss);
    REQUIRE(a.metrics[step].arrived == b.metrics[step].arrived);
    REQUIRE(a.metrics[step].threshold == b.metrics[step].threshold);
  }
  REQUIRE(a.evaluations.size() == b.evaluations.size());
  for (const auto& [step, evaluated] : a.evaluations) REQUIRE(evaluated.top1 == b.evaluations.at(step).top1);
}

std::vector<streaming_options> all_streams() {
  std::vector<streaming_options> all;
  for (const bool reaches_forward : {false, true}) {
    for (const std::size_t part_bytes : {std::size_t{0}, std::size_t{1024}, std::size_t{1} << 20})
      all.push_back({.is_in_parts = true, .reaches_forward = reaches_forward, .part_bytes = part_bytes});
  }
  return all;
}

std::string text_of(const streaming_options& each) {
  return std::string(each.reaches_forward ? "step" : "backward") + ", parts of " +
         std::to_string(each.part_bytes) + " bytes";
}

// Those of the whole frames, and of parts over MPI and in one process.
void require_same_in_parts(const settings& whole) {
  const diary expected = train(whole);
  if (rank_of_this() == 0) REQUIRE(expected.parameters.front() != expected.parameters.back());
  if (rank_of_this() == 0) require_equal_runs(train_in_process(whole), expected);
  for (const streaming_options& streaming : all_streams()) {
    INFO(text_of(streaming));
    settings in_parts = whole;
    in_parts.streaming = streaming;
    require_equal_runs(train(in_parts), expected);
    if (rank_of_this() == 0 && streaming.part_bytes == 1024)
      require_equal_runs(train_in_process(in_parts), expected);
  }
}

}  // namespace

TEST_CASE("streaming: a run in parts is that of whole frames, bit for bit, with momentum and decay") {
  require_same_in_parts({});
  settings dense;
  dense.compression.drop_ratio = 0;
  require_same_in_parts(dense);
}

TEST_CASE("streaming: the same with parts of layers, within a budget") {
  settings given;
  given.compression.part_elements = 4096;
  given.compression.byte_budget = 0.3;
  require_same_in_parts(given);
}

TEST_CASE("streaming: the same with rounded payloads and momentum in the residual") {
  settings given;
  given.compression.payload = lamina::payload_type::int8;
  given.compression.momentum = 0.9;
  given.optimizer = {.learning_rate = 0.05F};
  require_same_in_parts(given);
}

TEST_CASE("streaming: layers are decided in the order of the backward pass, and a budget shows it") {
  // The control: decided in the order of the model, other layers go out. Of 352 elements some fit, and which is a matter of order.
  if (rank_of_this() != 0) return;
  settings given;
  given.compression.byte_budget = 0.04;
  const diary expected = train_in_process(given);
  lamina::gradient_compressor<float> in_order(replica{torch::nn::AnyModule(network())}.model(),
                                              given.compression);
  std::vector<std::vector<float>> ones;
  for (const std::size_t size : in_order.model().sizes()) ones.emplace_back(size, 1.0F);
  in_order.accumulate_all(ones);
  in_order.encode();
  std::vector<std::size_t> sent;
  for (const std::size_t l : in_order.chosen().sent()) sent.push_back(l);
  REQUIRE(sent != expected.metrics.front().arrived);
}

TEST_CASE("streaming: parts leave before the last gradient of a step is there") {
  settings given;
  given.compression.drop_ratio = 0;
  for (const bool in_parts : {false, true}) {
    given.streaming = {.is_in_parts = in_parts, .reaches_forward = true, .part_bytes = 0};
    tap counts;
    std::size_t before = 0;
    std::size_t fewest = std::numeric_limits<std::size_t>::max();
    before_last_gradient = [&] {
      fewest = std::min(fewest, counts.parts - before);
      before = counts.parts;
    };
    train(given, &counts);
    before_last_gradient = {};
    if (rank_of_this() == 0) continue;
    // All layers but the first convolution have their gradient by then.
    constexpr std::size_t layers = 8;
    REQUIRE(fewest == (in_parts ? layers - 1 : 0));
    REQUIRE(counts.parts == (in_parts ? steps * layers : 0));
    REQUIRE((counts.parts_of_parameters > steps + 1) == in_parts);
  }
}

TEST_CASE("streaming: a checkpoint after any step holds what one of whole frames holds, and goes on") {
  settings given;
  given.checkpoint_period_steps = 6;
  const diary expected = train(given);
  for (const streaming_options& streaming : all_streams()) {
    INFO(text_of(streaming));
    settings in_parts = given;
    in_parts.streaming = streaming;
    const diary found = train(in_parts);
    REQUIRE(found.saved.size() == expected.saved.size());
    for (std::size_t i = 0; i < found.saved.size(); ++i) {
      REQUIRE(found.saved[i].step == expected.saved[i].step);
      const bool has_equal_states = found.saved[i].optimizer == expected.saved[i].optimizer &&
                                    found.saved[i].workers == expected.saved[i].workers;
      REQUIRE(has_equal_states);
    }
    constexpr std::uint64_t steps_done = 12;
    settings resumed = in_parts;
    resumed.steps_done = steps_done;
    if (rank_of_this() == 0) {
      resumed.from = found.saved[1];
      resumed.parameters = found.parameters[steps_done - 1];
    }
    const diary rest = train(resumed);
    if (rank_of_this() != 0) continue;
    REQUIRE(rest.parameters.size() == steps - steps_done);
    for (std::size_t i = 0; i < rest.parameters.size(); ++i)
      REQUIRE(same_bits(rest.parameters[i], found.parameters[steps_done + i]));
  }
}

TEST_CASE("streaming: a gradient that is not finite ends the worker with its layer's name") {
  if (rank_of_this() != 0) return;
  settings given;
  given.streaming = {.is_in_parts = true, .reaches_forward = true, .part_bytes = 0};
  given.optimizer.learning_rate = 1e30F;
  REQUIRE_THROWS_AS(train_in_process(given), lamina::non_finite_gradient);
}

int main(int argc, char** argv) {
  const mpi_session session(argc, argv, MPI_THREAD_FUNNELED);
  torch::set_num_threads(1);
  const int failures = Catch::Session().run(argc, argv);
  // One rank that fails must not leave the others waiting for the next test case.
  if (failures != 0) MPI_Abort(MPI_COMM_WORLD, 1);
  return 0;
}
