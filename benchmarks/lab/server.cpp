// SPDX-License-Identifier: MIT
// The loops of a synchronous parameter server and of its workers.
#include <lamina/aggregator.hpp>
#include <numeric>

#include "sgd.hpp"
#include "training.hpp"

namespace lab {
namespace {

// The parameters of a step, from the server or from the first worker of the node, which hands them on.
message receive_parameters(training& run, way* server, std::vector<std::byte>& handed_on) {
  constexpr std::size_t server_rank = 0;
  message arrived;
  if (server != nullptr) arrived = server->receive({&server_rank, 1}, message_kind::parameters)[0];
  if (!run.node) return arrived;
  std::uint64_t size = arrived.bytes.size();
  run.node->broadcast(std::as_writable_bytes(std::span(&size, 1)));
  handed_on.resize(size);
  std::ranges::copy(arrived.bytes, handed_on.begin());
  run.node->broadcast(handed_on);
  if (server == nullptr) arrived = {.kind = message_kind::parameters, .bytes = handed_on, .owner = {}};
  return arrived;
}

const lamina::selection& select_together(training& run, lamina::gradient_compressor<float>& compressor) {
  if (run.how.selection == "local") return compressor.select();
  std::vector<double> values(compressor.values().begin(), compressor.values().end());
  run.senders->average(values);
  return compressor.select(values);
}

}  // namespace

void serve(training& run, way& over) {
  replica& local = run.local;
  const lamina::layout& model = local.model();
  const loss_plan losses = run.losses();
  const auto parameters = [&](std::size_t l) { return local[l]; };
  const std::size_t count = run.clients();
  std::vector<std::size_t> clients(count);
  std::iota(clients.begin(), clients.end(), std::size_t{1});
  auto aggregator = lamina::gradient_aggregator<float>::of_nodes(
      model, std::vector<std::size_t>(count, run.how.workers_per_node));
  lamina::parameter_publisher<float> published(model, count, {.frame_checksum = losses.checksum()});
  const frame_cutter cutter(losses, model);
  sgd optimizer(model.elements(), run.how.momentum);
  for (std::uint64_t step = 1;; ++step) {
    const lamina::encoded_frame& frame = published.encode_for_all(step, parameters);
    const std::size_t frame_bytes = frame.size_bytes();
    {
      const work_clock::pause sending(run.clock);
      send_parameters(over, cutter, published, frame, clients);
    }
    run.examine(step);
    if (run.is_over(step)) return;

    std::vector<message> arrived;
    {
      const work_clock::pause waiting(run.clock);
      arrived = over.receive(clients, message_kind::gradients);
    }
    transfer_cost cost;
    for (const message& each : arrived) {
      if (each.transfer) cost += each.transfer->cost;
      read_from(run.name_of_caller(clients[each.sender]),
                [&] { aggregator.add(lamina::decode<float>(each.bytes, model)); });
    }
    for (const std::size_t l : aggregator.arrived().sent()) {
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> gradient) {
        optimizer.update(model.offset(l) + begin, gradient, local[l].subspan(begin, gradient.size()),
                         run.learning_rate(step));
      });
    }
    published.update(aggregator.arrived());
    aggregator.next_step();
    std::this_thread::sleep_for(std::chrono::duration<double>(run.how.server_seconds - run.clock.seconds()));
    run.log(step, {},
            {.bytes_down = frame_bytes * count,
             .receivers = count,
             .lost_up = losses.is_lossy ? std::optional(cost.lost_share()) : std::nullopt});
  }
}

void work(training& run, way* server) {
  replica& local = run.local;
  lamina::gradient_compressor<float> compressor(local.partition().model(), run.compression());
  std::optional<gradient_way> up;
  if (server != nullptr) up.emplace(*server, run.losses(), compressor.parts());
  std::vector<std::byte> handed_on;
  for (std::uint64_t step = 1;; ++step) {
    const message parameters = receive_parameters(run, server, handed_on);
    run.clock.take();
    write_parameters(parameters, local.model(), step, [&](std::size_t l) { return local[l]; });
    run.examine(step);
    if (run.is_over(step)) return;

    step_report report;
    run.compute(step, report);
    if (run.node) {
      run.node->barrier();  // the wait for one that computes longer is that worker's time, not the node's
      const stopwatch summing;
      run.node->sum_to_first(local.gradient_elements());
      report.node_seconds = summing.seconds();
    }
    if (server != nullptr) {
      compressor.accumulate_all(local.gradients());
      const lamina::selection& chosen = select_together(run, compressor);
      const lamina::encoded_frame& frame = compressor.encode();
      report.threshold = compressor.threshold();
      report.sent_bytes = static_cast<double>(frame.size_bytes());
      report.is_sender = 1;
      report.compute_seconds = run.clock.take();
      const auto sent = up->send(frame, chosen);
      if (sent.arrived) {
        compressor.commit(*sent.arrived);
      } else {
        compressor.commit();
      }
    } else {
      report.compute_seconds = run.clock.take();
    }
    run.log(step, report);
  }
}

}  // namespace lab
