// SPDX-License-Identifier: MIT
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "books.hpp"
#include "channel.hpp"
#include "checkpoint.hpp"
#include "lamina/lamina.hpp"
#include "memory_watch.hpp"
#include "setting.hpp"
#include "uplink.hpp"

namespace soak {

/// What the server tells about its process as it goes: all of it counted from the start of the process.
struct progress {
  std::uint64_t round = 0;
  std::uint64_t frames = 0;  // both ways
  std::uint64_t bytes = 0;
  std::uint64_t checkpoints = 0;
  std::uint64_t missing_elements = 0;  // of frames of gradients: did not arrive
  std::uint64_t growth_bytes = 0;      // the largest of all processes, as the next
  std::uint64_t peak_bytes = 0;
};

/// The parameter server of a run, from the newest checkpoint to the last round, and the books beside it.
class server {
 public:
  /// \param opened  of a run with packets
  server(const setting& run, std::vector<channel> workers, const checkpoint_directory& checkpoints,
         int progress_pipe, std::optional<opened_ranks> opened)
      : run_(run),
        workers_(std::move(workers)),
        checkpoints_(checkpoints),
        progress_pipe_(progress_pipe),
        model_(model()),
        partition_(model_, run.options.part_elements),
        parameters_(first_parameters(model_)),
        books_(run, model_),
        publisher_(parts(), run.workers),
        replied_(run.workers),
        packets_(run.workers) {
    if (opened) uplink_.emplace(run, parts(), 0, *std::move(opened));
    fcntl(progress_pipe_, F_SETFL, O_NONBLOCK);
  }

  /// `round` is the one that the process was in, for who reports a failure.
  void serve(std::uint64_t& round) {
    round = checkpoints_.newest();
    if (round > 0) load(round);
    audit(round, round > 0);
    for (std::size_t w = 0; w < run_.workers; ++w) reply(w, round);
    auto aggregator =
        lamina::gradient_aggregator<float>::of_workers(parts(), run_.workers, {.first_step = round + 1});
    while (round < run_.rounds) {
      const std::uint64_t next =
          std::min(run_.rounds, (round / run_.checkpoint_every + 1) * run_.checkpoint_every);
      if (run_.is_synchronous) {
        while (round < next) {
          ++round;
          serve_round(aggregator, round);
          report(round);
        }
      } else {
        serve_asynchronously(round, next);
      }
      checkpoint(round);
      report(round);
    }
  }

 private:
  const lamina::layout& parts() const { return partition_.parts(); }

  std::span<float> parameters_of(std::size_t part) {
    return std::span(parameters_).subspan(parts().offset(part), parts().sizes()[part]);
  }

  void require_replica(std::size_t worker, const message_header& header) const {
    if (header.replica != replied_[worker])
      throw std::runtime_error("the replica of worker " + std::to_string(worker) + " differs");
  }

  // The frame of a worker in a round, booked; a view without layers if the send was lost.
  lamina::frame_view<float> receive_gradients(std::size_t worker, std::uint64_t round) {
    auto [header, bytes] = workers_[worker].receive();
    require_replica(worker, header);
    if (header.round != round)
      throw std::runtime_error("a message of another round from " + workers_[worker].peer());
    books_.add_gradient(worker, round);
    if (header.kind == message_kind::lost_send) return {};
    if (header.kind != message_kind::gradients)
      throw std::runtime_error("no gradients from " + workers_[worker].peer());
    const lamina::delivery* arrived = nullptr;
    if (uplink_) {
      packets_[worker] = uplink_->receive(worker);
      bytes = packets_[worker].bytes;
      arrived = &packets_[worker].frame->arrived;
      done_.missing_elements += arrived->lost_elements();
    }
    auto frame = lamina::decode<float>(bytes, parts());
    lamina::expect(frame, lamina::frame_kind::gradients, round);
    if (frame.sender() != worker)
      throw std::runtime_error("the frame of another sender from " + workers_[worker].peer());
    books_.take(worker, frame, parts(), arrived);
    ++done_.frames;
    done_.bytes += bytes.size();
    return frame;
  }

  void serve_round(lamina::gradient_aggregator<float>& aggregator, std::uint64_t round) {
    for (std::size_t w = 0; w < run_.workers; ++w) {
      if (auto frame = receive_gradients(w, round); frame.layers() > 0) aggregator.add(std::move(frame));
    }
    if (!aggregator.is_complete()) aggregator.close();
    for (std::size_t part = 0; part < parts().layers(); ++part) {
      aggregator.mean(part, [&](std::size_t begin, std::span<const float> mean) {
        update(parameters_of(part).subspan(begin), mean, 1);
      });
    }
    publisher_.update(aggregator.arrived());
    aggregator.next_step();
    const auto parameters = [this](std::size_t part) { return parameters_of(part); };
    // One that does not arrive.
    if (reply_fails(run_, 0, round)) std::ignore = publisher_.encode_for_all(round, parameters);
    const lamina::encoded_frame& frame = publisher_.encode_for_all(round, parameters);
    for (std::size_t w = 0; w < run_.workers; ++w) send(w, round, frame);
    publisher_.commit_all();
  }

  // Each worker goes through the rounds up to `last` at its own pace; nobody waits for anybody.
  void serve_asynchronously(std::uint64_t& round, std::uint64_t last) {
    std::vector<std::uint64_t> next(run_.workers, round + 1);
    while (round < last) {
      std::vector<pollfd> waiting;
      for (std::size_t w = 0; w < run_.workers; ++w) {
        // One that is through is not listened to: poll() passes over negative descriptors.
        waiting.push_back({next[w] <= last ? workers_[w].descriptor() : -1, POLLIN, 0});
      }
      const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(deadline).count();
      const int ready = poll(waiting.data(), waiting.size(), static_cast<int>(milliseconds));
      if (ready == 0) throw std::runtime_error("nothing from any worker within the deadline");
      for (std::size_t w = 0; ready > 0 && w < run_.workers; ++w) {
        if (waiting[w].revents == 0) continue;
        apply(receive_gradients(w, next[w]));
        reply(w, next[w]);
        ++next[w];
      }
      const std::uint64_t slowest = *std::ranges::min_element(next) - 1;
      if (slowest > round) report(round = slowest);
    }
  }

  void apply(const lamina::frame_view<float>& frame) {
    lamina::selection layers(parts());
    for (std::size_t part = 0; part < frame.layers(); ++part) {
      if (frame.is_dropped(part)) continue;
      layers.send(part);
      frame.for_each_block(part, [&](std::size_t begin, std::span<const float> gradient) {
        update(parameters_of(part).subspan(begin), gradient, static_cast<float>(run_.workers));
      });
    }
    publisher_.update(layers);
  }

  static void update(std::span<float> parameters, std::span<const float> gradient, float workers) {
    for (std::size_t i = 0; i < gradient.size(); ++i)
      parameters[i] -= learning_rate * (gradient[i] / workers);
  }

  // What this worker has not seen.
  void reply(std::size_t worker, std::uint64_t round) {
    const auto parameters = [this](std::size_t part) { return parameters_of(part); };
    const std::size_t seen_by = run_.fault == "server-wide" && round > 0 ? 0 : worker;
    // One that does not arrive.
    if (reply_fails(run_, worker, round)) std::ignore = publisher_.encode(seen_by, round, parameters);
    send(worker, round, publisher_.encode(seen_by, round, parameters));
    publisher_.commit(seen_by);
  }

  void send(std::size_t worker, std::uint64_t round, const lamina::encoded_frame& frame) {
    workers_[worker].send(message_kind::parameters, round, 0, frame.segments());
    replied_[worker] = hash_of(parameters_);
    ++done_.frames;
    done_.bytes += frame.size_bytes();
  }

  // All workers are at the same round. Each gets what it has not seen, saves, and shows what it has; the server's own
  // file makes the checkpoint complete.
  void checkpoint(std::uint64_t round) {
    for (std::size_t w = 0; w < run_.workers; ++w) {
      require_replica(w, workers_[w].receive(message_kind::arrived, round).first);
    }
    for (std::size_t w = 0; w < run_.workers; ++w) reply(w, round);
    audit(round, true);
    books_.check_parameters(parameters_);
    save(round);
    ++done_.checkpoints;
    memory_.look();
    for (channel& each : workers_) each.send(message_kind::go_on, round, 0);
  }

  void audit(std::uint64_t round, bool has_replicas) {
    std::vector<float> residual(model_.elements());
    for (std::size_t w = 0; w < run_.workers; ++w) {
      const auto [header, bytes] = workers_[w].receive(message_kind::audit, round);
      if (has_replicas && header.replica != hash_of(parameters_)) {
        throw std::runtime_error("the replica of worker " + std::to_string(w) + " differs");
      }
      std::uint64_t memory[2] = {};
      if (bytes.size() != sizeof memory + model_.elements() * sizeof(float))
        throw std::runtime_error("an audit of another size");
      std::memcpy(memory, bytes.data(), sizeof memory);
      std::memcpy(residual.data(), bytes.data() + sizeof memory, bytes.size() - sizeof memory);
      books_.check_residual(w, residual);
      done_.growth_bytes = std::max({done_.growth_bytes, memory[0], memory_.growth_bytes()});
      done_.peak_bytes = std::max({done_.peak_bytes, memory[1], memory_.peak_bytes()});
    }
  }

  void save(std::uint64_t round) {
    file_writer file;
    file.add(parameters_);
    books_.save(file);
    checkpoints_.save(file, "server", round, run_.checkpoint_every);
  }
  void load(std::uint64_t round) {
    file_reader file(checkpoints_.file("server", round));
    parameters_ = file.vector_of<float>();
    books_.load(file);
    if (parameters_.size() != model_.elements())
      throw std::runtime_error("the checkpoint is of another model");
  }

  // To a pipe that nobody may be reading any more: what does not fit is left out, the next report has it all.
  void report(std::uint64_t round) {
    done_.round = round;
    [[maybe_unused]] const ssize_t ignored = write(progress_pipe_, &done_, sizeof done_);
  }

  setting run_;
  std::vector<channel> workers_;
  checkpoint_directory checkpoints_;
  int progress_pipe_;
  lamina::layout model_;
  lamina::partition partition_;
  std::vector<float> parameters_;
  books books_;
  lamina::parameter_publisher<float> publisher_;
  std::vector<std::uint64_t> replied_;  // the hash of what each worker should hold
  std::optional<uplink> uplink_;
  std::vector<udp::arrival> packets_;  // what came of each worker's last frame
  memory_watch memory_;
  progress done_;
};

}  // namespace soak
