// SPDX-License-Identifier: MIT
// The loops of a synchronous parameter server and of its workers.
#include <lamina/codec.hpp>
#include <numeric>
#include <thread>

#include "sgd.hpp"
#include "training.hpp"

namespace lab {
namespace {

// The parameters of a step, from the server or from the first worker of the node, which hands them on.
std::span<const std::byte> receive_parameters(training& run, way* server, std::vector<std::byte>& handed_on) {
  constexpr std::size_t server_rank = 0;
  std::span<const std::byte> arrived;
  if (server != nullptr) arrived = server->receive({&server_rank, 1})[0].bytes;
  if (!run.node) return arrived;
  std::uint64_t size = arrived.size();
  run.node->broadcast(std::as_writable_bytes(std::span(&size, 1)));
  handed_on.assign(arrived.begin(), arrived.end());
  handed_on.resize(size);
  run.node->broadcast(handed_on);
  return handed_on;
}

}  // namespace

void serve(training& run, way& over) {
  replica& local = run.local;
  const lamina::layout& model = local.tiling().model();
  const std::size_t count = run.clients();
  std::vector<std::size_t> clients(count);
  std::iota(clients.begin(), clients.end(), std::size_t{1});
  lamina::server<float> server(model, {.nodes = std::vector<std::size_t>(count, run.how.workers_per_node),
                                       .fragment_elements = run.how.fragment_elements,
                                       .frame_checksum = run.how.links.checksum()});
  sgd optimizer(model.elements(), run.how.momentum);
  for (std::uint64_t step = 1;; ++step) {
    const lamina::server_reply parameters = reply_to_all(server, local.parameters());
    const std::size_t frame_bytes = parameters.size_bytes();
    {
      const work_clock::pause sending(run.clock);
      over.send_parameters(clients, parameters.frame(), parameters.sent());
      commit_all(server, parameters);
    }
    if (run.is_over(step)) return run.examine();

    std::vector<arrival> arrived;
    {
      const work_clock::pause waiting(run.clock);
      arrived = over.receive(clients);
    }
    const double lost_up =
        add_gradients(server, arrived, [&](std::size_t rank) { return run.name_of_caller(rank); });
    server.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) {
      const auto x = lamina::writable_elements_of<float>(local.parameters()[layer]);
      optimizer.update(model.offset(layer) + begin, mean, x.subspan(begin, mean.size()),
                       run.learning_rate(step));
    });
    std::this_thread::sleep_for(std::chrono::duration<double>(run.how.server_seconds - run.clock.seconds()));
    run.log(step, {},
            {.bytes_down = frame_bytes * count,
             .receivers = count,
             .lost_up = run.how.links.is_lossy() ? std::optional(lost_up) : std::nullopt});
  }
}

void work(training& run, way* server) {
  replica& local = run.local;
  lamina::worker<float> worker(local.tiling().model(), run.compression());
  std::vector<std::byte> handed_on;
  for (std::uint64_t number = 1;; ++number) {
    const std::span<const std::byte> parameters = receive_parameters(run, server, handed_on);
    run.clock.take();
    lamina::apply<float>(parameters, local.tiling(), number, local.parameters());
    if (run.is_over(number)) return run.examine();

    step_report report;
    run.compute(number, report);
    if (run.node) {
      run.node->barrier();  // the wait for one that computes longer is that worker's time, not the node's
      const stopwatch summing;
      run.node->sum_to_first(local.gradient_elements());
      report.node_seconds = summing.seconds();
    }
    if (server != nullptr) {
      auto step = worker.add(local.gradients());
      if (!step) refuse_gradient(worker.model(), step.refused_layer());
      if (run.how.selection == "agreed") run.senders->average(step.values());
      const lamina::encoded_frame& frame = step.frame();
      report.sent_bytes = static_cast<double>(frame.size_bytes());
      report.is_sender = 1;
      report.compute_seconds = run.clock.take();
      if (const auto arrived = server->send_gradients(frame, step.sent())) {
        step.commit(*arrived);
      } else {
        step.commit();
      }
    } else {
      report.compute_seconds = run.clock.take();
    }
    run.log(number, report);
  }
}

}  // namespace lab
