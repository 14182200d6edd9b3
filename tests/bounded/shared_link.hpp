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
    instant delay = 100us;
    stop_policy stop = stop_policy::eager;
    std::uint32_t bound_ppm = 100'000;
    std::uint64_t told_link_bits = 0;  ///< what the ends believe; 0: nothing
    std::size_t frame_elements = 65'000;
  };

  explicit shared_link(const options& given)
      : options_(given),
        model_(model_of({given.frame_elements})),
        grid_(bounded::chunk_grid::of<float>(model_, payload_type::as_is, 352)),
        random_(7),
        made_(random_, model_, everything(model_)),
        chunks_(made_.cut(grid_, given.bound_ppm)),
        data({.seed = 3,
              .loss = given.loss,
              .delay = given.delay,
              .link_bits = given.link_bits,
              .queue_bytes = given.queue_bytes}),
        limits_(grid_),
        check_(test_secret) {
    for (std::size_t s = 0; s < given.senders; ++s) {
      ends.push_back(std::make_unique<end>(end{
          bounded::bounded_sender(grid_, {.rank = static_cast<std::uint16_t>(s + 1),
                                          .secret = test_secret,
                                          .rate = {.link_bits = given.told_link_bits,
                                                   .senders = static_cast<std::uint32_t>(given.senders)}}),
          bounded::bounded_receiver(grid_, {.sender = static_cast<std::uint16_t>(s + 1),
                                            .secret = test_secret,
                                            .most_bound_ppm = bounded::most_bound_ppm,
                                            .stop = given.stop}),
          lossy_channel({.delay = given.delay}), lossy_channel({.delay = given.delay})}));
      ends.back()->receiver.set_load(static_cast<std::uint32_t>(given.senders), 0);
    }
  }

  struct end {
    bounded::bounded_sender sender;
    bounded::bounded_receiver receiver;
    lossy_channel up, down;
    std::uint64_t reports = 0;
    std::uint64_t transfers = 0;
    std::uint64_t lost_chunks = 0;  // of all of them
  };

  /// Until this time; the senders begin again and again.
  void run(instant until) {
    while (now < until) {
      instant at = data.next();
      for (const auto& each : ends) {
        if (!each->sender.is_under_way() && each->sender.state() != sender_state::failed) {
          each->receiver.release(now);
          each->sender.begin(chunks_);
        }
        pump(*each);
        at = std::min(
            {at, each->up.next(), each->down.next(), each->sender.deadline(), each->receiver.deadline()});
      }
      at = std::min(at, data.next());
      if (at >= bounded::never) return;
      now = std::max(now, at);
      while (auto arrived = data.receive(now)) {
        ends[arrived->from]->receiver.on_datagram(arrived->bytes, now);
        pump(*ends[arrived->from]);
      }
      for (const auto& each : ends) {
        while (auto message = each->up.receive(now)) give(*each, message->bytes, true);
        while (auto message = each->down.receive(now)) give(*each, message->bytes, false);
      }
    }
  }

  std::vector<std::unique_ptr<end>> ends;
  instant now{};

 private:
  void pump(end& each) {
    const std::size_t index = static_cast<std::size_t>(
        std::ranges::find_if(ends, [&](const auto& other) { return other.get() == &each; }) - ends.begin());
    send_all(each.sender, each.up);
    while (auto packet = each.sender.next_packet(now)) {
      data.send(index, {packet->header, packet->data[0], packet->data[1]}, now);
    }
    send_all(each.sender, each.up);
    send_all(each.receiver, each.down);
  }
  template <class End>
  void send_all(End& from, lossy_channel& to) {
    for (auto all = from.poll_control(now); !all.empty(); all = from.poll_control(now))
      to.send(0, {all}, now);
  }
  void give(end& each, std::span<const std::byte> bytes, bool is_up) {
    std::error_code error;
    const auto message = bounded::read_control(bytes, limits_, check_, error);
    if (is_up) {
      each.receiver.on_control(message, now);
    } else {
      each.reports += message.header.type == bounded::control_type::report ? 1 : 0;
      each.sender.on_control(message);
      if (message.header.type == bounded::control_type::stop) {
        ++each.transfers;
        each.lost_chunks += each.sender.arrived().lost_chunks();
      }
    }
    pump(each);
  }

  options options_;
  lamina::layout model_;
  bounded::chunk_grid grid_;
  std::mt19937 random_;
  made_frame<float> made_;
  bounded::frame_chunks chunks_;

 public:
  lossy_channel data;

 private:
  bounded::control_limits limits_;
  bounded::keyed_check check_;
};

}  // namespace lamina_test
