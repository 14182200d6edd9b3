// SPDX-License-Identifier: MIT
#include "loops/server.hpp"

#include <algorithm>
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "loops/losses.hpp"

namespace lab {

void send_states(server_link& workers, const server_state& from) {
  std::span<const std::vector<std::byte>> states = from.workers;
  const std::vector<std::size_t> of_clients = workers.workers_of_clients();
  for (std::size_t c = 0; c < workers.clients(); ++c) {
    workers.send(c, message_kind::state, payload(pack(states.first(of_clients[c]))));
    states = states.subspan(of_clients[c]);
  }
}

std::vector<std::vector<std::byte>> receive_states(server_link& workers) {
  std::vector<std::vector<std::byte>> states;
  for (const message& each : workers.receive_from_all(message_kind::state)) {
    for (auto& worker : unpack(each.bytes)) states.push_back(std::move(worker));
  }
  return states;
}

void check_replicas(std::span<const pushed> reports, const replica& local, std::uint64_t step,
                    const server_link& workers) {
  std::uint64_t expected = 0;
  for (const pushed& each : reports) {
    if (each.report.replica_hash == 0) continue;
    if (expected == 0) expected = hash_of(local);
    if (each.report.replica_hash != expected) throw other_replica(workers.name_of(each.sender), step);
  }
}

std::vector<pushed> take_frames(server_link& workers, const replica& local, std::uint64_t step, step_log& log,
                                lamina::gradient_aggregator<float>& into) {
  std::vector<pushed> frames = workers.receive_gradients();
  check_replicas(frames, local, step, workers);
  log.received(frames, step);
  for (const pushed& each : frames) {
    read_from(workers.name_of(each.sender),
              [&] { into.add(lamina::decode<float>(each.bytes, local.model())); });
  }
  if (frames.size() < workers.clients()) into.close();
  return frames;
}

void finish(server_link& workers, const replica& local, std::uint64_t step, step_log& log) {
  const std::vector<pushed> last = workers.receive_last_reports();
  check_replicas(last, local, step, workers);
  log.finished(last, step);
}

std::vector<std::byte> state_of(const sgd& optimizer) {
  return pack(
      std::vector{bytes_of_elements(optimizer.velocity()), bytes_of_elements(optimizer.updated_in())});
}

void take_up(std::span<const std::byte> state, sgd& optimizer) {
  const auto parts = unpack(state);
  if (parts.size() != 2) throw link_error("the state to resume from is that of another optimizer");
  read_elements(parts[0], std::as_writable_bytes(optimizer.velocity()));
  read_elements(parts[1], std::as_writable_bytes(optimizer.updated_in()));
}

void serve(server_link& workers, const replica& local, const server_options& options,
           const server_tasks& tasks, server_state from) {
  const training_plan& plan = options.plan;
  const lamina::layout& model = local.model();
  const auto parameters = [&](std::size_t l) { return local[l]; };
  auto aggregator = lamina::gradient_aggregator<float>::of_nodes(model, workers.workers_of_clients(),
                                                                 {.first_step = from.step + 1});
  const auto out = std::make_shared<published_model>(
      published_model{local, lamina::parameter_publisher<float>(
                                 model, workers.clients(), {.frame_checksum = checksum_of(plan.losses)})});
  const parameter_way down(plan.losses, model);
  sgd optimizer(model, options.optimizer);
  step_log log(model, tasks.records, workers.clock());

  if (from.step > 0) {
    take_up(from.optimizer, optimizer);
    send_states(workers, from);
    from.workers.clear();
  }
  for (std::uint64_t step = from.step + 1;; ++step) {
    const lamina::encoded_frame& frame = out->frames.encode_for_all(step, parameters);
    const std::vector<sent_frame> sent =
        down.send_to_all(workers, out->frames, frame, plan.bound_down_before(step), parameters, out);
    for (std::size_t c = 0; c < sent.size(); ++c) commit(out->frames, c, sent[c]);
    log.published(frame.size_bytes(), workers.clients_left());
    log.lost(sent);

    if (plan.averages_statistics_before(step)) workers.average();
    if (plan.is_over(step)) return finish(workers, local, step, log);
    if (plan.agrees_on_selection) workers.average();

    const std::vector<pushed> gradients = take_frames(workers, local, step, log, aggregator);
    optimizer.set_learning_rate(options.learning_rate.at(step));
    for (std::size_t l = 0; l < model.layers(); ++l) {
      // Blocks of the mean go straight into the update; a layer that did not arrive has none and stays untouched.
      if (aggregator.arrived().is_sent(l)) optimizer.begin(l, step);
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> gradient) {
        optimizer.update(l, begin, gradient, parameters(l));
      });
    }
    out->frames.update(aggregator.arrived());
    if (tasks.updated) tasks.updated(workers.clock().seconds());
    log.finish_step(step, optimizer.learning_rate(), aggregator.arrived());
    aggregator.next_step();

    if (plan.makes_checkpoint_after(step)) {
      const server_state state{
          .step = step, .optimizer = state_of(optimizer), .workers = receive_states(workers)};
      if (tasks.save) tasks.save(state);
      log.restart();
    }
  }
}

}  // namespace lab
