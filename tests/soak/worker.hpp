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

#include "channel.hpp"
#include "checkpoint.hpp"
#include "lamina/lamina.hpp"
#include "memory_watch.hpp"
#include "setting.hpp"
#include "uplink.hpp"

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
        compressor_(model_, options_of(run, index)),
        replica_(model_.elements()) {
    if (opened) uplink_.emplace(run, compressor_.parts(), index + 1, *std::move(opened));
  }

  /// `round` is the one that the process was in, for who reports a failure.
  void work(std::uint64_t& round) {
    round = checkpoints_.newest();
    if (round > 0) load(round);
    audit(round);
    take_parameters(round);
    while (round < run_.rounds) {
      ++round;
      accumulate(round);
      send(round);
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
  static lamina::compressor_options options_of(const setting& run, std::size_t index) {
    lamina::compressor_options options = run.options;
    options.sender = static_cast<std::uint32_t>(index);
    return options;
  }

  void accumulate(std::uint64_t step) {
    std::vector<std::vector<float>> gradients;
    for (std::size_t l = 0; l < model_.layers(); ++l)
      gradients.push_back(gradient_of(run_, model_, index_, step, l));
    if (const auto bad = bad_element(run_, model_, index_, step)) {
      float& element = gradients[bad->first][bad->second];
      const float good = std::exchange(element, std::numeric_limits<float>::quiet_NaN());
      if (run_.options.non_finite == lamina::non_finite::refuse) {
        require_refused(gradients);
        element = good;
      } else {
        ++left_out_;
      }
    }
    if (step % 2 == 0) {
      compressor_.accumulate_all(gradients);
    } else {
      for (std::size_t l = gradients.size(); l-- > 0;) compressor_.accumulate(l, gradients[l]);
    }
    if (compressor_.residual().left_out_elements() != left_out_)
      throw std::runtime_error("elements left out: wrong number");
  }

  void require_refused(const std::vector<std::vector<float>>& gradients) {
    try {
      compressor_.accumulate_all(gradients);
    } catch (const lamina::non_finite_gradient&) {
      return;
    }
    throw std::runtime_error("a gradient with NaN was accepted");
  }

  void send(std::uint64_t step) {
    const lamina::encoded_frame& frame = compressor_.encode();
    const std::uint64_t replica = hash_of(replica_);
    if (send_fails(run_, index_, step)) {
      server_.send(message_kind::lost_send, step, replica);
      if (run_.fault != "commit-lost") return;
    } else if (uplink_) {
      server_.send(message_kind::gradients, step, replica);
      const lamina::delivery arrived = uplink_->send(frame, compressor_.chosen());
      if (run_.fault != "commit-whole") return compressor_.commit(arrived);
    } else {
      server_.send(message_kind::gradients, step, replica, frame.segments());
    }
    compressor_.commit();
  }

  void take_parameters(std::uint64_t step) {
    const auto [header, bytes] = server_.receive(message_kind::parameters, step);
    const lamina::layout& parts = compressor_.parts();
    const auto frame = lamina::decode<float>(bytes, parts);
    if (frame.kind() != lamina::frame_kind::parameters)
      throw std::runtime_error("no parameters from the server");
    for (std::size_t part = 0; part < parts.layers(); ++part) {
      frame.apply_to(part, std::span(replica_).subspan(parts.offset(part), parts.sizes()[part]));
    }
  }

  void audit(std::uint64_t round) {
    const std::uint64_t memory[2] = {memory_.growth_bytes(), memory_.peak_bytes()};
    server_.send(message_kind::audit, round, hash_of(replica_),
                 {std::as_bytes(std::span(memory)), std::as_bytes(compressor_.residual().elements())});
  }

  std::string name() const { return "worker" + std::to_string(index_); }

  void save(std::uint64_t round) {
    if (run_.fault == "skip-save" && index_ == 1) return;
    file_writer file;
    file.add(compressor_.save());
    file.add(replica_);
    checkpoints_.save(file, name(), round, run_.checkpoint_every);
  }
  void load(std::uint64_t round) {
    file_reader file(checkpoints_.file(name(), round));
    compressor_.load(file.vector_of<std::byte>());
    replica_ = file.vector_of<float>();
    if (compressor_.step() != round) throw std::runtime_error("the state is of another step");
  }

  setting run_;
  std::size_t index_;
  channel server_;
  checkpoint_directory checkpoints_;
  lamina::layout model_;
  lamina::gradient_compressor<float> compressor_;
  std::vector<float> replica_;
  std::optional<uplink> uplink_;
  std::size_t left_out_ = 0;
  memory_watch memory_;
};

}  // namespace soak
