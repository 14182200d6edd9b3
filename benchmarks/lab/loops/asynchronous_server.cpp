// SPDX-License-Identifier: MIT
#include <algorithm>
#include <functional>
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "loops/losses.hpp"
#include "loops/server.hpp"

namespace lab {
namespace {

// The gradients of a client in its step, checked to be that.
lamina::frame_view<float> decode_from(const pushed& arrived, const lamina::layout& model, std::uint64_t step,
                                      const std::string& name) {
  auto frame = read_from(name, [&] {
    auto gradients = lamina::decode<float>(arrived.bytes, model);
    lamina::expect(gradients, lamina::frame_kind::gradients, step);
    return gradients;
  });
  if (frame.sender() == arrived.sender) return frame;
  throw link_error(name + " sent the frame of another sender, " + std::to_string(frame.sender()));
}

}  // namespace

void serve_asynchronously(server_link& workers, const replica& local, const server_options& options,
                          const server_tasks& tasks) {
  const lamina::layout& model = local.model();
  const auto parameters = [&](std::size_t l) { return local[l]; };
  const std::size_t clients = workers.clients();
  const std::vector<std::size_t> workers_of = workers.workers_of_clients();
  const auto all_workers =
      static_cast<float>(std::accumulate(workers_of.begin(), workers_of.end(), std::size_t{0}));
  const training_plan& plan = options.plan;
  lamina::parameter_publisher<float> frames(model, clients, {.frame_checksum = checksum_of(plan.losses)});
  const parameter_way down(plan.losses, model);
  std::vector<sent_frame> sent(clients);  // the last frame of each, where some of it may have been lost
  sgd optimizer(model, options.optimizer);
  std::vector<std::uint64_t> steps_done(clients, 0);
  std::vector<std::uint64_t> answered_at(clients, 0);  // frames applied when the client last got parameters
  std::uint64_t applied = 0;
  step_log log(model, tasks.records, workers.clock());

  // Replies are copies: the parameters go on changing while one is on its way. The first is the same for all.
  const lamina::encoded_frame& whole = frames.encode_for_all(1, parameters);
  const payload first(whole.to_bytes());
  log.published(whole.size_bytes(), clients);
  std::vector<std::size_t> computing;  // clients whose gradients, or last report, are to come
  std::vector<std::size_t> ahead;      // too far, or at their end: those who wait for their reply
  std::vector<std::size_t> asking;     // at their end: those who wait for a mean
  std::vector<pushed> last;
  if (plan.losses.is_lossy) {
    sent = down.send_to_all(workers, frames, whole, plan.bound_down_before(1), parameters, nullptr);
    log.lost(sent);
  }
  for (std::size_t c = 0; c < clients; ++c) {
    if (!plan.losses.is_lossy) workers.begin_send(c, message_kind::parameters, first);
    computing.push_back(c);
  }
  const auto answer = [&](std::size_t c) {
    const std::uint64_t next = steps_done[c] + 1;
    const lamina::encoded_frame& frame = frames.encode(c, next, parameters);
    if (plan.losses.is_lossy) {
      sent[c] = down.send(workers, c, frames, frame, plan.bound_down_before(next), parameters);
      log.lost(std::span(&sent[c], 1));
    } else {
      workers.begin_send(c, message_kind::parameters, payload(frame.to_bytes()));
    }
    log.published(frame.size_bytes(), 1);
    answered_at[c] = applied;
    computing.insert(std::ranges::lower_bound(computing, c), c);
  };
  const auto is_at_end = [&](std::size_t c) { return options.plan.is_over(steps_done[c] + 1); };
  // The last reply holds the gradients of all: it is what is evaluated and saved.
  const auto may_go_on = [&](std::size_t c) {
    const std::uint64_t slowest = *std::ranges::min_element(steps_done);
    if (is_at_end(c)) return slowest == steps_done[c];
    return !options.staleness_steps || steps_done[c] - slowest <= *options.staleness_steps;
  };
  const auto answer_with_mean = [&](std::size_t c) {
    workers.answer_with_mean(c);
    computing.insert(std::ranges::lower_bound(computing, c), c);
  };

  while (!computing.empty()) {
    const message arrived = workers.receive_from_any(computing);
    const std::size_t c = arrived.sender;
    std::erase(computing, c);
    if (arrived.kind == message_kind::values) {
      workers.take_values(arrived);
      if (!is_at_end(c)) {
        answer_with_mean(c);
      } else if (asking.push_back(c); asking.size() == clients) {
        std::ranges::for_each(asking, answer_with_mean);
      }
      continue;
    }
    expect(arrived, is_at_end(c) ? message_kind::finished : message_kind::gradients, workers.name_of(c));
    const pushed gradients = read_pushed(arrived);
    log.evaluated(gradients.report, steps_done[c] + 1, clients);
    if (is_at_end(c)) {
      last.push_back(gradients);
      continue;
    }

    const auto frame = decode_from(gradients, model, steps_done[c] + 1, workers.name_of(c));
    commit(frames, c, sent[c]);  // who has gradients of a step has its parameters
    const std::uint64_t step = applied / clients + 1;
    optimizer.set_learning_rate(options.learning_rate.at(step));
    lamina::selection layers(model);
    std::vector<float> share;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (frame.is_dropped(l)) continue;
      layers.send(l);
      optimizer.begin(l, step);
      frame.for_each_block(l, [&](std::size_t begin, std::span<const float> gradient) {
        share.assign(gradient.begin(), gradient.end());
        for (float& each : share) each /= all_workers;
        optimizer.update(l, begin, share, parameters(l));
      });
    }
    frames.update(layers);
    log.applied(gradients, layers, applied - answered_at[c]);
    ++applied;
    ++steps_done[c];
    if (applied % clients == 0) log.finish_step(step, optimizer.learning_rate());

    ahead.push_back(c);
    const auto answered = std::ranges::stable_partition(ahead, std::not_fn(may_go_on));
    std::ranges::for_each(answered, answer);
    ahead.erase(answered.begin(), answered.end());
  }
  check_replicas(last, local, options.plan.steps + 1, workers);
}

}  // namespace lab
