// SPDX-License-Identifier: MIT
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <chrono>
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

#include "lamina/lamina.hpp"
#include "lamina/udp/udp.hpp"
#include "process.hpp"
#include "setting.hpp"

namespace soak {

inline constexpr float learning_rate = 0.0625F;

inline std::vector<float> first_parameters(const lamina::layout& model) {
  std::vector<float> parameters(model.elements());
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i] = static_cast<float>(i % 17) - 8;
  return parameters;
}

/// What should be where, kept apart from the library in double, where all sums of a run are exact: for each worker what it
/// has computed and the server has not received, which must be its residual; and what the model should be.
class books {
 public:
  books(const setting& run, const lamina::layout& model)
      : run_(run),
        model_(model),
        received_(model.elements()),
        outstanding_(run.workers, std::vector<double>(model.elements())),
        velocity_(outstanding_) {}

  /// The worker has added its gradient of this step.
  void add_gradient(std::size_t worker, std::uint64_t step) {
    auto bad = bad_element(run_, model_, worker, step);
    if (run_.options.non_finite == lamina::non_finite::refuse) bad.reset();  // refused, and then sent good
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      const std::vector<float> gradient = gradient_of(run_, model_, worker, step, l);
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        if (bad == std::pair(l, i)) continue;
        const std::size_t at = model_.offset(l) + i;
        velocity_[worker][at] =
            run_.options.momentum * velocity_[worker][at] + static_cast<double>(gradient[i]);
        outstanding_[worker][at] += velocity_[worker][at];
      }
    }
  }

  /// The server has received this frame, with zeros where nothing arrived; nullptr: all of it has. Fragments lie in the order of the layers, so
  /// their offsets are the model's.
  void take(std::size_t worker, const lamina::frame_view<float>& frame, const lamina::layout& fragments,
            const lamina::delivery* arrived) {
    for (std::size_t fragment = 0; fragment < fragments.layers(); ++fragment) {
      if (frame.is_dropped(fragment)) continue;
      sent_.resize(fragments.sizes()[fragment]);
      frame.restore(fragment, sent_);
      const auto reset = [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) velocity_[worker][fragments.offset(fragment) + i] = 0;
      };
      arrived == nullptr ? reset(0, sent_.size()) : arrived->for_each_delivered(fragment, reset);
      for (std::size_t i = 0; i < sent_.size(); ++i) {
        const std::size_t at = fragments.offset(fragment) + i;
        outstanding_[worker][at] -= static_cast<double>(sent_[i]);
        received_[at] += static_cast<double>(sent_[i]);
      }
    }
  }

  /// Conservation: what was received and the residual are the sum of the gradients, ==. Throws with the number of
  /// elements that are not.
  void check_residual(std::size_t worker, std::span<const float> residual) const {
    std::size_t lost = residual.size() == model_.elements() ? 0 : model_.elements();
    for (std::size_t i = 0; i < residual.size() && residual.size() == model_.elements(); ++i) {
      lost += static_cast<double>(residual[i]) != outstanding_[worker][i];
    }
    if (lost > 0)
      throw std::runtime_error("worker " + std::to_string(worker) +
                               ": lost elements: " + std::to_string(lost));
  }

  /// The model is what plain SGD makes of everything received, ==. Not where a step went on without some workers: its
  /// mean is over those that came, and rounds.
  void check_parameters(const std::vector<float>& parameters) const {
    if (run_.is_synchronous && run_.sends_fail) return;
    const std::vector<float> first = first_parameters(model_);
    const double share = static_cast<double>(learning_rate) / static_cast<double>(run_.workers);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (static_cast<double>(parameters[i]) != static_cast<double>(first[i]) - share * received_[i]) {
        throw std::runtime_error("parameter " + std::to_string(i) + " is not what was received");
      }
    }
  }

  void save(std::ostream& out) const {
    write(out, received_);
    for (const auto* all : {&outstanding_, &velocity_}) {
      for (const auto& each : *all) write(out, each);
    }
  }
  void load(std::istream& in) {
    read(in, received_);
    for (auto* all : {&outstanding_, &velocity_}) {
      for (auto& each : *all) read(in, each);
    }
  }

 private:
  setting run_;
  lamina::layout model_;
  std::vector<double> received_;  // from all workers together
  std::vector<std::vector<double>> outstanding_;
  std::vector<std::vector<double>> velocity_;
  std::vector<float> sent_;
};

namespace udp = lamina::udp;

/// What all ranks open before they are processes: the server, which is rank 0, and the workers.
struct opened_ranks {
  std::vector<udp::open_sockets> sockets;
  std::vector<udp::rank_addresses> addresses;
  std::uint64_t secret = 0;
};
inline opened_ranks open_ranks(const setting& run) {
  opened_ranks all;
  all.secret = udp::draw_secret();
  for (std::size_t rank = 0; rank <= run.workers; ++rank) {
    all.sockets.emplace_back(
        udp::parse_addresses("127.0.0.1:0"),
        udp::socket_options{.inject_loss = run.inject_loss, .inject_seed = run.seed << 8U | rank});
    all.addresses.push_back(all.sockets.back().addresses);
  }
  return all;
}

/// The gradients' way: packets over UDP on loopback, some of which are lost. One end of it. Throws udp::peers_lost where a peer is gone.
class uplink {
 public:
  uplink(const setting& run, const lamina::layout& fragments, std::size_t rank, opened_ranks opened)
      : run_(run), grid_(grid_of(run, fragments)), losses_(grid_) {
    udp::open_sockets here = std::move(opened.sockets[rank]);
    opened.sockets.clear();  // those of the others are theirs
    udp::transport_options options{
        .rank = rank,
        .ranks = run.workers + 1,
        .secret = opened.secret,
        .mtu = mtu,
        .rate = {.link_bits = 10'000'000'000,
                 .senders = rank == server ? 1 : static_cast<std::uint32_t>(run.workers)},
        .meeting_timeout = 2 * timeout,
        .name_of = name_of};
    for (std::size_t other = 0; other <= run.workers; ++other) {
      if ((rank == server) == (other == server)) continue;
      options.peers.push_back({.rank = other,
                               .sends = grid_,
                               .takes = grid_,
                               .most_bound_ppm = rank == server ? run.bound_ppm : 0,
                               .timeout = timeout});
    }
    transport_.emplace(std::move(here), opened.addresses, options);
  }

  /// A worker's: what of the frame has arrived.
  lamina::delivery send(const lamina::encoded_frame& frame, const lamina::selection& chosen) {
    const lamina::bounded::frame_chunks chunks(frame, chosen, grid_, {.bound_ppm = run_.bound_ppm});
    const lamina::bounded::obligations owed{.required = losses_.required(chosen, most_losses)};
    auto sent = transport_->send_frame({&server, 1}, chunks, {&owed, 1});
    losses_.note(sent[0].value());
    return std::move(sent[0]).value();
  }

  /// The server's: the worker's next frame, with zeros where nothing arrived. It stands until the one after it is asked for. Throws
  /// std::runtime_error where more is missing than may be.
  udp::arrival receive(std::size_t worker) {
    udp::arrival got = transport_->receive(worker + 1);
    const lamina::delivery& arrived = got.arrived;
    for (std::size_t fragment = 0; fragment < grid_.fragments().layers(); ++fragment) {
      const std::size_t chunks = arrived.chunks(fragment);
      if (arrived.lost_chunks(fragment) * 1'000'000 > chunks * run_.bound_ppm)
        throw std::runtime_error("worker " + std::to_string(worker) + ": " +
                                 std::to_string(arrived.lost_chunks(fragment)) + " of " +
                                 std::to_string(chunks) + " chunks of a fragment are missing");
    }
    return got;
  }

 private:
  static constexpr std::size_t server = 0;
  static constexpr std::size_t mtu = 1500;
  static constexpr std::chrono::seconds timeout = deadline;
  static constexpr unsigned most_losses =
      1;  // a velocity that waits for long needs more digits than a float has

  static std::string name_of(std::size_t rank) {
    return rank == server ? "the server" : "worker " + std::to_string(rank - 1);
  }
  static lamina::bounded::chunk_grid grid_of(const setting& run, const lamina::layout& fragments) {
    const std::size_t bytes = mtu - 28 - lamina::bounded::packet_header_bytes;
    const auto type = run.options.payload;
    return lamina::bounded::chunk_grid::of<float>(fragments, type,
                                                  lamina::bounded::chunk_elements<float>(type, bytes));
  }

  setting run_;
  lamina::bounded::chunk_grid grid_;
  lamina::bounded::loss_memory losses_;
  std::optional<udp::transport> transport_;
};

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

/// The parameter server of a run, from the newest checkpoint to the last round, and its books.
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
    workers_[worker].send(message_kind::parameters, round, 0, reply.frame().segments());
    server_.commit(seen_by, reply.clock());
    replied_[worker] = hash_of(parameters_);
    ++done_.frames;
    done_.bytes += reply.frame().size_bytes();
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
      done_.growth_bytes = std::max({done_.growth_bytes, memory[0], memory_.growth});
      done_.peak_bytes = std::max({done_.peak_bytes, memory[1], memory_.peak});
    }
  }

  void save(std::uint64_t round) {
    checkpoints_.save("server", round, run_.checkpoint_every, [&](std::ostream& out) {
      write(out, parameters_);
      books_.save(out);
    });
  }
  void load(std::uint64_t round) {
    std::ifstream in = checkpoints_.load("server", round);
    read(in, parameters_);
    books_.load(in);
  }

  // To a pipe that nobody may be reading any more: what does not fit is left out, the next report has it all.
  void report(std::uint64_t round) {
    done_.round = round;
    [[maybe_unused]] const ssize_t ignored = ::write(progress_pipe_, &done_, sizeof done_);
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
