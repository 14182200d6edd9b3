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

struct setting {
  explicit setting(lamina::frame_kind kind)
      : random(6),
        model(lamina_test::model_of({130, 0, 64, 40, 700})),
        grid(bounded::chunk_grid::of<float>(model, payload_type::as_is, 8)),
        made(random, model, some_of(model), payload_type::as_is, kind),
        chunks(made.cut(grid, 100'000)) {}
  static lamina::selection some_of(const lamina::layout& model) {
    lamina::selection chosen(model);
    chosen.send(0);
    chosen.send(4);
    return chosen;
  }
  std::mt19937 random;
  lamina::layout model;
  bounded::chunk_grid grid;
  made_frame<float> made;
  bounded::frame_chunks chunks;
};

const setting& some_setting() {
  static const setting made(lamina::frame_kind::parameters);
  return made;
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
    bounded::keyed_check key(test_secret);
    const std::span<const std::byte> sealed = all;
    const std::uint64_t sum = key.of({sealed.first(16), sealed.subspan(24)});
    std::memcpy(all.data() + 16, &sum, sizeof sum);
  }
  return all;
}

void check_done(const bounded::bounded_sender& sender, const setting& of) {
  for (const std::size_t fragment : sender.arrived().sent().sent()) {
    check(
        sender.arrived().lost_chunks(fragment) <= bounded::allowed_losses(100'000, of.grid.chunks(fragment)),
        "no STOP leaves a fragment beyond its bound");
  }
}

}  // namespace

void fuzz_one(input in) {
  const setting& of = some_setting();
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
  bytes to_receiver, to_sender, datagram;
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
          if (!packet) continue;
          datagram.assign(packet->header.begin(), packet->header.end());
          datagram.insert(datagram.end(), packet->data[0].begin(), packet->data[0].end());
          if (k % 8 != 0) receiver.on_datagram(datagram, now);
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
          const bytes frame = was_frozen ? bytes(receiver.frame().begin(), receiver.frame().end()) : bytes();
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
          if (sender.state() == sender_state::done && !was_done) check_done(sender, of);
          check(!error || !sender.is_under_way(), "an error ends a transfer");
        }
        check(has_name(error), "a refusal has a name");
      }
    }
  }
}

}  // namespace lamina_fuzz::of_control
