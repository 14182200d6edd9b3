// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "server.hpp"

namespace soak {

/// The worker's side of a run, the same in both modes: from the newest checkpoint to the last round.
class worker {
 public:
  /// \param opened  of a run with packets
  worker(const setting& run, std::size_t index, channel server, const checkpoint_directory& checkpoints,
         std::optional<opened_ranks> opened)
      : run_(run),
        index_(index),
        server_(std::move(server)),
        checkpoints_(checkpoints),
        model_(model()),
        worker_(model_, options_of(run, index)),
        replica_(model_.elements()) {
    if (opened) uplink_.emplace(run, worker_.fragments(), index + 1, *std::move(opened));
  }

  /// `round` is the one that the process was in, for who reports a failure.
  void work(std::uint64_t& round) {
    round = checkpoints_.newest();
    if (round > 0) load(round);
    audit(round);
    take_parameters(round);
    while (round < run_.rounds) {
      ++round;
      send(round);
      if (worker_.steps() < round)
        worker_.skip_to(round + 1);  // its send was lost: the server has gone on without it
      take_parameters(round);
      if (!is_checkpoint(run_, round)) continue;
      server_.send(message_kind::arrived, round, hash_of(replica_));
      take_parameters(round);
      save(round);
      memory_.look();
      audit(round);
      server_.receive(message_kind::go_on, round);
    }
  }

 private:
  static lamina::worker_options options_of(const setting& run, std::size_t index) {
    lamina::worker_options options = run.options;
    options.sender = static_cast<std::uint32_t>(index);
    return options;
  }

  lamina::worker<float>::step add_gradients(std::uint64_t round) {
    std::vector<std::vector<float>> gradients;
    for (std::size_t l = 0; l < model_.layers(); ++l)
      gradients.push_back(gradient_of(run_, model_, index_, round, l));
    if (const auto bad = bad_element(run_, model_, index_, round)) {
      float& element = gradients[bad->first][bad->second];
      const float good = std::exchange(element, std::numeric_limits<float>::quiet_NaN());
      if (run_.options.non_finite == lamina::non_finite::refuse) {
        if (worker_.add(gradients)) throw std::runtime_error("a gradient with NaN was accepted");
        element = good;
      } else {
        ++left_out_;
      }
    }
    auto added = worker_.begin();
    if (round % 2 == 0) {
      added.add(gradients);
    } else {
      for (std::size_t l = gradients.size(); l-- > 0;) added.add(l, gradients[l]);
    }
    if (worker_.residual().left_out_elements() != left_out_)
      throw std::runtime_error("elements left out: wrong number");
    return added;
  }

  void send(std::uint64_t round) {
    auto open = add_gradients(round);
    const lamina::encoded_frame& frame = open.frame();
    const std::uint64_t replica = hash_of(replica_);
    if (send_fails(run_, index_, round)) {
      server_.send(message_kind::lost_send, round, replica);
      if (run_.fault != "commit-lost") return;
    } else if (uplink_) {
      server_.send(message_kind::gradients, round, replica);
      const lamina::delivery arrived = uplink_->send(frame, open.sent());
      if (run_.fault != "commit-whole") return open.commit(arrived);
    } else {
      server_.send(message_kind::gradients, round, replica, frame.segments());
    }
    open.commit();
  }

  void take_parameters(std::uint64_t step) {
    const auto [header, bytes] = server_.receive(message_kind::parameters, step);
    const lamina::layout& fragments = worker_.fragments();
    const auto frame = lamina::decode<float>(bytes, fragments);
    if (frame.kind() != lamina::frame_kind::parameters)
      throw std::runtime_error("no parameters from the server");
    for (std::size_t f = 0; f < fragments.layers(); ++f)
      frame.apply_to(f, std::span(replica_).subspan(fragments.offset(f), fragments.sizes()[f]));
  }

  void audit(std::uint64_t round) {
    const std::uint64_t memory[2] = {memory_.growth, memory_.peak};
    server_.send(message_kind::audit, round, hash_of(replica_),
                 {std::as_bytes(std::span(memory)), std::as_bytes(worker_.residual().elements())});
  }

  std::string name() const { return "worker" + std::to_string(index_); }

  void save(std::uint64_t round) {
    if (run_.fault == "skip-save" && index_ == 1) return;
    checkpoints_.save(name(), round, run_.checkpoint_every, [&](std::ostream& out) {
      write(out, worker_.save());
      write(out, replica_);
    });
  }
  void load(std::uint64_t round) {
    std::ifstream in = checkpoints_.load(name(), round);
    std::vector<std::byte> state;
    read(in, state);
    read(in, replica_);
    worker_.load(state);
    if (worker_.steps() != round) throw std::runtime_error("the state is of another step");
  }

  setting run_;
  std::size_t index_;
  channel server_;
  checkpoint_directory checkpoints_;
  lamina::layout model_;
  lamina::worker<float> worker_;
  std::vector<float> replica_;
  std::optional<uplink> uplink_;
  std::size_t left_out_ = 0;
  memory_watch memory_;
};

}  // namespace soak
