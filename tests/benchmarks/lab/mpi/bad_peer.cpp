// SPDX-License-Identifier: MIT
// bad_peer FAULT, under mpirun: a server and workers as in benchmarks/lab, of which the last worker does what the
// fault says when it pushes its third frame.
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/utils.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <lamina/worker.hpp>
#include <string>
#include <thread>
#include <vector>

#include "launch/topology.hpp"
#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "messages/mpi_transport.hpp"
#include "model/passes.hpp"
#include "model/replica.hpp"

namespace {

using namespace lab;

constexpr std::uint64_t steps = 6;
constexpr std::uint64_t bad_step = 3;

// Wide enough that a push takes a while.
struct wide_impl : torch::nn::Module {
  wide_impl() : layer(register_module("layer", torch::nn::Linear(4, 1 << 20))) {}
  torch::Tensor forward(const torch::Tensor& x) { return layer->forward(x).slice(1, 0, 3); }
  torch::nn::Linear layer;
};
TORCH_MODULE_IMPL(wide, wide_impl);

using frame_bytes = std::vector<std::byte>;

frame_bytes frame_of_another_model() {
  lamina::gradient_compressor<float> compressor(lamina::layout({{"another", {7}}}));
  compressor.accumulate(0, std::vector<float>(7, 1.0F));
  return compressor.encode().to_bytes();
}

// Passes everything on, but for one push.
class bad_transport : public transport {
 public:
  bad_transport(transport& inner, std::string fault) : inner_(inner), fault_(std::move(fault)) {}
  std::size_t rank() const override { return inner_.rank(); }
  std::size_t ranks() const override { return inner_.ranks(); }
  std::string name_of(std::size_t rank) const override { return inner_.name_of(rank); }
  std::vector<message> receive_from_each(std::span<const std::size_t> from) override {
    return inner_.receive_from_each(from);
  }
  void begin_send(std::size_t to, message_kind kind, const payload& what) override {
    inner_.begin_send(to, kind, what);
  }
  message receive_from_any(std::span<const std::size_t> from) override {
    return inner_.receive_from_any(from);
  }
  message exchange(std::size_t to, message_kind kind, const payload& what, std::size_t from) override {
    return inner_.exchange(to, kind, what, from);
  }

  void send(std::span<const std::size_t> to, message_kind kind, const payload& what) override {
    if (kind != message_kind::gradients) return inner_.send(to, kind, what);
    frame_bytes frame;
    for (const auto segment : what.segments()) frame.insert(frame.end(), segment.begin(), segment.end());
    const frame_bytes report(frame.end() - report_bytes, frame.end());
    frame.resize(frame.size() - report_bytes);
    if (++pushes_ == bad_step) {
      std::fprintf(stderr, "the fault\n");
      if (fault_ == "killed_before") std::raise(SIGKILL);
      if (fault_ == "killed_during") {
        std::thread([] {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          std::raise(SIGKILL);
        }).detach();
      }
      if (fault_ == "corrupted") frame[frame.size() / 2] ^= std::byte{4};
      if (fault_ == "truncated") frame.resize(frame.size() - 8);
      if (fault_ == "replayed") frame = last_;
      if (fault_ == "of_another_model") frame = frame_of_another_model();
    }
    payload sent(frame);
    sent.append(payload(report));
    inner_.send(to, kind, sent);
    if (pushes_ == bad_step && fault_ == "killed_after") std::raise(SIGKILL);
    last_ = std::move(frame);
  }

 private:
  transport& inner_;
  std::string fault_;
  std::uint64_t pushes_ = 0;
  frame_bytes last_;
};

void play(transport& ranks, const topology& who) {
  const training_plan plan = {.steps = steps, .evaluates = false};
  torch::manual_seed(1);
  replica local{torch::nn::AnyModule(wide())};
  if (who.is_server(ranks.rank())) {
    std::vector<client> clients;
    for (const auto& node : who.nodes) clients.push_back({.rank = node.front()});
    server_link link(ranks, clients);
    const server_options options = {.plan = plan,
                                    .optimizer = {.learning_rate = 0.01F},
                                    .learning_rate = learning_rate_schedule(0.01F, {}, 0)};
    serve(link, local, options, {});
    return;
  }
  const std::size_t worker = who.worker_on(ranks.rank());
  const auto compute = [&](std::uint64_t, step_report& report) {
    compute_gradients(local, {torch::ones({8, 4}), torch::zeros({8}, torch::kLong)}, report);
  };
  const worker_tasks tasks = {.compute = compute, .evaluate = {}, .pulled = {}, .save = {}, .load = {}};
  worker_options options = {.plan = plan, .compression = {.drop_ratio = 0}};
  options.compression.sender = static_cast<std::uint32_t>(worker);
  worker_link link(ranks, 0);
  work(link, local, tasks, options);
}

}  // namespace

int main(int argc, char** argv) {
  const mpi_session session(argc, argv);
  torch::set_num_threads(1);
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const topology who = flat_topology(static_cast<std::size_t>(ranks - 1));
  mpi_transport good(MPI_COMM_WORLD, {.max_message_bytes = 1 << 30,
                                      .timeout_of = [](std::size_t) { return std::chrono::seconds(60); },
                                      .exchange_timeout = std::chrono::seconds(60),
                                      .name_of = [&](std::size_t rank) { return who.name_of(rank); }});
  bad_transport bad(good, argc > 1 ? argv[1] : "");
  try {
    play(good.rank() + 1 == good.ranks() ? static_cast<transport&>(bad) : good, who);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", who.name_of(good.rank()).c_str(), error.what());
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  }
  return EXIT_SUCCESS;
}
