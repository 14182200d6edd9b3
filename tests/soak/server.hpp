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
#include <system_error>
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

  void add(const progress& other) {
    frames += other.frames;
    bytes += other.bytes;
    checkpoints += other.checkpoints;
    missing_elements += other.missing_elements;
    growth_bytes = std::max(growth_bytes, other.growth_bytes);
    peak_bytes = std::max(peak_bytes, other.peak_bytes);
  }
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
        server_(model_, {.workers = run.workers,
                         .asynchronous = !run.is_synchronous,
                         .fragment_elements = run.options.fragment_elements,
                         .first_step = checkpoints.newest() + 1}),
        parameters_(first_parameters(model_)),
        books_(run, model_),
        replied_(run.workers),
        packets_(run.workers) {
    if (opened) uplink_.emplace(run, fragments(), 0, *std::move(opened));
    fcntl(progress_pipe_, F_SETFL, O_NONBLOCK);
  }

  /// `round` is the one that the process was in, for who reports a failure.
  void serve(std::uint64_t& round) {
    round = checkpoints_.newest();
    if (round > 0) load(round);
    audit(round, round > 0);
    for (std::size_t w = 0; w < run_.workers; ++w) reply(w, round);
    while (round < run_.rounds) {
      const std::uint64_t next =
          std::min(run_.rounds, (round / run_.checkpoint_every + 1) * run_.checkpoint_every);
      if (run_.is_synchronous) {
        while (round < next) {
          ++round;
          for (std::size_t w = 0; w < run_.workers; ++w) receive_gradients(w, round);
          update();
          for (std::size_t w = 0; w < run_.workers; ++w) reply(w, round);
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
  const lamina::layout& fragments() const { return server_.fragments(); }

  void require_replica(std::size_t worker, const message_header& header) const {
    if (header.replica != replied_[worker])
      throw std::runtime_error("the replica of worker " + std::to_string(worker) + " differs");
  }

  // The frame of a worker in a round, booked, unless the send was lost.
  void receive_gradients(std::size_t worker, std::uint64_t round) {
    auto [header, bytes] = workers_[worker].receive();
    require_replica(worker, header);
    if (header.round != round)
      throw std::runtime_error("a message of another round from " + workers_[worker].peer());
    books_.add_gradient(worker, round);
    if (header.kind == message_kind::lost_send) return;
    if (header.kind != message_kind::gradients)
      throw std::runtime_error("no gradients from " + workers_[worker].peer());
    const lamina::delivery* arrived = nullptr;
    if (uplink_) {
      packets_[worker] = uplink_->receive(worker);
      bytes = packets_[worker]->bytes;
      arrived = &packets_[worker]->arrived;
      done_.missing_elements += arrived->lost_elements();
    }
    const auto frame = lamina::decode<float>(bytes, fragments());
    if (frame.sender() != worker)
      throw std::runtime_error("the frame of another sender from " + workers_[worker].peer());
    books_.take(worker, frame, fragments(), arrived);
    ++done_.frames;
    done_.bytes += bytes.size();
    if (const auto error = server_.add({bytes.begin(), bytes.end()})) throw std::system_error(error);
  }

  void update() {
    server_.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) {
      float* to = parameters_.data() + model_.offset(layer) + begin;
      for (const float each : mean) *to++ -= learning_rate * each;
    });
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
        receive_gradients(w, next[w]);
        if (server_.complete()) update();
        reply(w, next[w]);
        ++next[w];
      }
      const std::uint64_t slowest = *std::ranges::min_element(next) - 1;
      if (slowest > round) report(round = slowest);
    }
  }

  // What this worker has not seen.
  void reply(std::size_t worker, std::uint64_t round) {
    std::vector<std::span<const float>> layers;
    for (std::size_t l = 0; l < model_.layers(); ++l)
      layers.push_back(std::span(parameters_).subspan(model_.offset(l), model_.sizes()[l]));
    const std::size_t seen_by = run_.fault == "server-wide" && round > 0 ? 0 : worker;
    if (reply_fails(run_, worker, round))
      std::ignore = server_.reply(seen_by, layers);  // one that does not arrive
    const auto reply = server_.reply(seen_by, layers);
    send(worker, round, reply.frame());
    server_.commit(seen_by, reply.clock());
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
  lamina::server<float> server_;
  std::vector<float> parameters_;
  books books_;
  std::vector<std::uint64_t> replied_;  // the hash of what each worker should hold
  std::optional<uplink> uplink_;
  std::vector<std::optional<udp::arrival>> packets_;  // what came of each worker's last frame
  memory_watch memory_;
  progress done_;
};

}  // namespace soak
