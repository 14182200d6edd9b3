// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "bounded/simulated_transfer.hpp"
#include "lossy_channel.hpp"

namespace lamina_test {

/// Several senders, each with a receiver of its own, whose packets meet in one queue before one link; each sends one frame after the other.
/// Messages do not wait in queues.
class shared_link {
 public:
  struct options {
    std::size_t senders = 4;
    double link_bits = 200e6;
    std::size_t queue_bytes = 65'536;
    double loss = 0;
    std::uint32_t bound_ppm = 100'000;
    std::uint64_t told_link_bits = 0;  ///< what the ends believe; 0: nothing
  };

  explicit shared_link(const options& given)
      : grid_(bounded::chunk_grid::of<float>(model_, payload_type::as_is, 352)),
        made_(random_, model_, everything(model_)),
        chunks_(made_.cut(grid_, given.bound_ppm)),
        data({.seed = 3,
              .loss = given.loss,
              .delay = 100us,
              .link_bits = given.link_bits,
              .queue_bytes = given.queue_bytes}) {
    const auto senders = static_cast<std::uint32_t>(given.senders);
    for (std::uint32_t s = 0; s < senders; ++s) {
      ends.push_back(std::make_unique<simulated_link>(
          grid_, simulated_link::options{.rate = {.link_bits = given.told_link_bits, .senders = senders},
                                         .shared = {&data, s}}));
      ends.back()->up = ends.back()->down = lossy_channel({.delay = 100us});
      ends.back()->receiver.set_load(senders, 0);
    }
  }

  /// Until this time; the senders begin again and again.
  void run(instant until) {
    while (now < until) {
      instant at = bounded::never;
      for (const auto& each : ends) {
        if (!each->sender.is_under_way() && each->sender.state() != sender_state::failed) {
          each->receiver.release(now);
          each->sender.begin(chunks_);
        }
        each->pump();
        at = std::min(at, each->next());
      }
      at = std::min(at, data.next());
      if (at >= bounded::never) return;
      now = std::max(now, at);
      for (const auto& each : ends) each->now = now;
      while (auto arrived = data.receive(now)) ends[arrived->from]->take(arrived->bytes);
      for (const auto& each : ends) each->deliver();
    }
  }

  std::vector<std::unique_ptr<simulated_link>> ends;
  instant now{};

 private:
  lamina::layout model_ = model_of({65'000});
  bounded::chunk_grid grid_;
  std::mt19937 random_{7};
  made_frame<float> made_;
  bounded::frame_chunks chunks_;

 public:
  lossy_channel data;
};

}  // namespace lamina_test
