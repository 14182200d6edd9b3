// SPDX-License-Identifier: MIT
#include <algorithm>
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "loops/streaming.hpp"

namespace lab {
namespace {

class streaming_server {
  auto parameters() const {
    return [this](std::size_t l) { return local_[l]; };
  }

 public:
  streaming_server(server_link& workers, const replica& local, const server_options& options,
                   const streaming_options& streaming, const server_tasks& tasks, std::uint64_t steps_done)
      : workers_(workers),
        local_(local),
        options_(options),
        streaming_(streaming),
        tasks_(tasks),
        out_(std::make_shared<published_model>(
            published_model{local, lamina::parameter_publisher<float>(local.model(), workers.clients())})),
        aggregator_(lamina::gradient_aggregator<float>::of_nodes(local.model(), workers.workers_of_clients(),
                                                                 {.first_step = steps_done + 1})),
        optimizer_(local.model(), options.optimizer),
        log_(local.model(), tasks.records, workers.clock()),
        done_(local.model()),
        updated_(local.model()) {}

  void run(server_state from) {
    const training_plan& plan = options_.plan;
    if (from.step > 0) {
      take_up(from.optimizer, optimizer_);
      send_states(workers_, from);
      from.workers.clear();
    }
    send(out_->frames.encode_for_all(from.step + 1, parameters()));
    out_->frames.commit_all();
    for (std::uint64_t step = from.step + 1;; ++step) {
      log_.published(std::exchange(published_bytes_, 0), workers_.clients());
      if (plan.averages_statistics_before(step)) workers_.average();
      if (plan.is_over(step)) return finish(workers_, local_, step, log_);
      take_step(step);
      if (tasks_.updated) tasks_.updated(workers_.clock().seconds());
      log_.finish_step(step, optimizer_.learning_rate(), aggregator_.arrived());
      aggregator_.next_step();
      if (!plan.makes_checkpoint_after(step)) continue;
      const server_state state{
          .step = step, .optimizer = state_of(optimizer_), .workers = receive_states(workers_)};
      if (tasks_.save) tasks_.save(state);
      log_.restart();
    }
  }

 private:
  // The parts of all workers, whichever comes first, and the parameters that come of them.
  void take_step(std::uint64_t step) {
    optimizer_.set_learning_rate(options_.learning_rate.at(step));
    hash_ = options_.plan.compares_replicas_before(step) ? hash_of(local_) : 0;
    received_bytes_.assign(workers_.clients(), 0);
    reports_.assign(workers_.clients(), {});
    done_.clear();
    updated_.clear();
    is_free_ = false;
    kept_.clear();
    std::vector<std::size_t> open(workers_.clients());
    std::iota(open.begin(), open.end(), std::size_t{0});
    while (!open.empty()) {
      kept_.push_back(workers_.receive_from_any(open));
      if (take_part(kept_.back(), step)) std::erase(open, kept_.back().sender);
      update_resolved(step);
    }
    // In the clients' order, whoever was the first: sums of what they report are the same bits.
    for (std::size_t c = 0; c < workers_.clients(); ++c) {
      log_.evaluated(reports_[c], step, workers_.clients());
      log_.add_report(reports_[c], received_bytes_[c]);
    }
  }

  // Whether it was the client's last.
  bool take_part(const message& arrived, std::uint64_t step) {
    const std::string name = workers_.name_of(arrived.sender);
    const bool is_last = arrived.kind == message_kind::gradients;
    if (!is_last) expect(arrived, message_kind::part, name);
    std::span<const std::byte> bytes = arrived.bytes;
    if (is_last) {
      const pushed last = read_pushed(arrived);
      bytes = last.bytes;
      reports_[arrived.sender] = last.report;
    }
    read_from(name, [&] {
      const auto frame = lamina::decode<float>(bytes, local_.model());
      if (frame.sender() != arrived.sender) throw lamina::decode_error(lamina::frame_errc::unknown_sender);
      if (frame.ends_step() != is_last) throw lamina::decode_error(lamina::frame_errc::unexpected_part);
      aggregator_.add(frame);
      return 0;
    });
    received_bytes_[arrived.sender] += bytes.size();
    if (!is_last) return false;
    const std::uint64_t hash = reports_[arrived.sender].replica_hash;
    if (hash != 0 && hash != hash_) throw other_replica(name, step);
    return true;
  }

  // Layers that all have decided by now: those that somebody sent are updated, and go out when there are enough.
  void update_resolved(std::uint64_t step) {
    lamina::selection news(local_.model());
    for (std::size_t l = 0; l < local_.model().layers(); ++l) {
      if (local_.model().sizes()[l] == 0 || done_.is_sent(l) || !aggregator_.is_resolved(l)) continue;
      done_.send(l);
      if (!aggregator_.arrived().is_sent(l)) continue;
      wait_until_free();
      optimizer_.begin(l, step);
      // Blocks of the mean go straight into the update.
      aggregator_.mean(l, [&](std::size_t begin, std::span<const float> gradient) {
        optimizer_.update(l, begin, gradient, local_[l]);
      });
      news.send(l);
    }
    out_->frames.update(news);
    for (const std::size_t l : news.sent()) updated_.send(l);
    if (aggregator_.is_complete()) {
      wait_until_free();
      send(out_->frames.encode_rest_for_all(step + 1, parameters()));
      out_->frames.commit_all();
    } else if (updated_.sent_elements() > 0 &&
               updated_.sent_elements() * sizeof(float) >= streaming_.part_bytes) {
      send(out_->frames.encode_ready_for_all(step + 1, done_, parameters()));
      updated_.clear();
    }
  }

  // Who has decided a layer of this step has all parameters that it began with: this waits for MPI's word on it alone.
  void wait_until_free() {
    if (!std::exchange(is_free_, true)) workers_.flush();
  }

  void send(const lamina::encoded_frame& frame) {
    published_bytes_ += frame.size_bytes();
    for (std::size_t c = 0; c < workers_.clients(); ++c)
      workers_.begin_send(c, message_kind::parameters, {frame.segments(), out_});
  }

  server_link& workers_;
  const replica& local_;
  const server_options& options_;
  const streaming_options& streaming_;
  const server_tasks& tasks_;
  std::shared_ptr<published_model> out_;
  lamina::gradient_aggregator<float> aggregator_;
  sgd optimizer_;
  step_log log_;
  std::vector<message> kept_;  // of the step: the aggregator points into them
  lamina::selection done_;     // resolved in this step, and taken up
  lamina::selection updated_;  // since the last part
  bool is_free_ = false;       // what the step began with has been sent to all
  std::uint64_t hash_ = 0;     // of the parameters that the step began with, where replicas are compared
  std::vector<step_report> reports_;         // of each client, with its last part
  std::vector<std::size_t> received_bytes_;  // of each client, in this step
  std::size_t published_bytes_ = 0;          // for the next
};

}  // namespace

void serve_in_parts(server_link& workers, const replica& local, const server_options& options,
                    const streaming_options& streaming, const server_tasks& tasks, server_state from) {
  streaming_server(workers, local, options, streaming, tasks, from.step).run(std::move(from));
}

}  // namespace lab
