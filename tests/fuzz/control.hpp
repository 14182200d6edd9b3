// SPDX-License-Identifier: MIT
#pragma once

// Any control messages, most of them under a good check, at a sender and a receiver in any state: each is taken or refused by
// name, and no end that says it is done is beyond its bound.
#include "bounded/simulated_transfer.hpp"
#include "fuzz.hpp"

namespace lamina_fuzz::of_control {
namespace {

using namespace lamina_test;
using bounded::control_type;

const cut_frame& some_frame() {
  static const cut_frame frame(
      {130, 0, 64, 40, 700},
      {.seed = 6, .bound_ppm = 100'000, .kind = lamina::frame_kind::parameters, .dropped = {1, 2, 3}});
  return frame;
}

bool has_name(const std::error_code& error) {
  return !error || error.category() == lamina::category();
}

// A message of the fuzzer's choice: its own bytes, or what the other end has just written with some bytes changed.
bytes message_of(input& in, const bytes& last) {
  bytes all = last;
  const std::size_t how = in.below(4);
  if (how == 0) {
    all = in.take(in.value<std::uint16_t>() % 600);
  } else if (how > 1 && !all.empty()) {
    const std::size_t at = in.value<std::uint16_t>() % all.size();
    const bytes changed = in.take(1 + in.below(8));
    std::copy_n(changed.begin(), std::min(changed.size(), all.size() - at),
                all.begin() + static_cast<std::ptrdiff_t>(at));
    if (in.below(8) == 7) all.resize(in.value<std::uint16_t>() % (all.size() + 20));
  }
  if (how != 1 && all.size() >= 24 && in.below(8) != 0) {
    const auto size = static_cast<std::uint32_t>(all.size() - 24);
    std::memcpy(all.data(), &size, sizeof size);
    return sealed(std::move(all), 16);
  }
  return all;
}

}  // namespace

void fuzz_one(input in) {
  const cut_frame& of = some_frame();
  bounded::bounded_sender sender(of.grid,
                                 {.rank = 2, .secret = test_secret, .rate = {.link_bits = 10'000'000'000}});
  bounded::bounded_receiver receiver(of.grid,
                                     {.sender = 2,
                                      .secret = test_secret,
                                      .kind = lamina::frame_kind::parameters,
                                      .most_bound_ppm = 200'000,
                                      .stop = in.flag() ? stop_policy::eager : stop_policy::on_probe});
  const bounded::control_limits limits(of.grid);
  bounded::keyed_check key(test_secret);
  instant now{};
  bytes to_receiver, to_sender;
  while (!in.is_empty()) {
    now += in.below(64) * 500us;
    switch (in.below(8)) {
      case 0:
        if (sender.state() == sender_state::idle || sender.state() == sender_state::done) {
          const std::vector required = {bounded::chunk{4, 7, 0}};
          const std::vector repairs = {
              bounded::repair{2, 8, std::as_bytes(std::span(of.made.values[2]).subspan(8, 16))}};
          sender.begin(of.chunks, {.required = required, .repairs = repairs});
        }
        break;
      case 1:
        receiver.release(now);
        break;
      case 2:
      case 3: {
        const auto all = sender.poll_control(now);
        if (!all.empty()) to_receiver.assign(all.begin(), all.end());
        break;
      }
      case 4: {
        const auto all = receiver.poll_control(now);
        if (!all.empty()) to_sender.assign(all.begin(), all.end());
        break;
      }
      case 5:
        for (std::size_t k = in.below(256); k > 0; --k) {
          const auto packet = sender.next_packet(now += 10us);
          if (packet && k % 8 != 0) receiver.on_datagram(joined(*packet), now);
        }
        break;
      default: {
        const bool goes_up = in.flag();
        const bytes all = message_of(in, goes_up ? to_receiver : to_sender);
        std::error_code error;
        const auto message = bounded::read_control(all, limits, key, error);
        check(has_name(error), "a refusal has a name");
        if (error) break;
        if (goes_up) {
          const bool was_frozen = receiver.state() == receiver_state::frozen;
          const bytes frame = was_frozen ? copy_of(receiver.frame()) : bytes();
          error = receiver.on_control(message, now);
          if (was_frozen && receiver.state() == receiver_state::frozen)
            check(lamina_test::same_bits(frame, receiver.frame()), "what is frozen stands");
          if (!error && receiver.state() == receiver_state::open) {
            std::error_code bad;
            lamina::decode<float>(receiver.frame(), of.model, bad);
            check(!bad, "what a BEGIN opens, decode() takes");
          }
          if (error && was_frozen) {  // its frame stands until it is released
            check(receiver.state() == receiver_state::frozen, "an error leaves what is frozen");
            check(receiver.release(now) == error, "a release tells of the error");
          }
          check(!error || receiver.state() == receiver_state::failed, "an error ends a receiver");
        } else {
          const bool was_done = sender.state() == sender_state::done;
          error = sender.on_control(message);
          if (sender.state() == sender_state::done && !was_done)
            check(keeps_bound(sender.arrived(), of.grid, 100'000),
                  "no STOP leaves a fragment beyond its bound");
          check(!error || !sender.is_under_way(), "an error ends a transfer");
        }
        check(has_name(error), "a refusal has a name");
      }
    }
  }
}

}  // namespace lamina_fuzz::of_control
