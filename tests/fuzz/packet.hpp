// SPDX-License-Identifier: MIT
#pragma once

// Any datagrams at a receiver with an open transfer: each gets a name, and what arrives is only what was sent.
#include "bounded/simulated_transfer.hpp"
#include "fuzz.hpp"

namespace lamina_fuzz::of_packet {
namespace {

using namespace lamina_test;

// The number of packets is small, so that a byte chooses one.
struct setting : cut_frame {
  explicit setting(payload_type type)
      : cut_frame({130, 0, 64, 40},
                  {.seed = 5, .chunk_elements = 64, .bound_ppm = 400'000, .type = type, .dropped = {1, 2}}) {
    simulated_link link(grid, {});
    link.delays = [&](const bounded::outgoing_packet& packet) -> std::vector<instant> {
      packets.push_back(joined(packet));
      return {};
    };
    link.sender.begin(chunks);
    begin = copy_of(link.sender.poll_control(link.now));
    link.up.send(0, {begin}, link.now);
    link.run([&] { return link.sender.state() == sender_state::probing; });
  }
  bytes begin;
  std::vector<bytes> packets;
};

const setting& setting_of(bool has_blocks) {
  static const setting as_is(payload_type::as_is);
  static const setting int4(payload_type::int4);
  return has_blocks ? int4 : as_is;
}

}  // namespace

void fuzz_one(input in) {
  const setting& of = setting_of(in.flag());
  bounded::bounded_receiver receiver(of.grid,
                                     {.sender = 2,
                                      .secret = test_secret,
                                      .most_bound_ppm = bounded::most_bound_ppm,
                                      .stop = in.flag() ? stop_policy::eager : stop_policy::on_probe});
  bounded::keyed_check key(test_secret);
  std::error_code error;
  receiver.on_control(bounded::read_control(of.begin, bounded::control_limits(of.grid), key, error), 0s);
  check(!error && receiver.state() == receiver_state::open, "a good BEGIN opens");
  while (!receiver.poll_control(0s).empty()) {
  }
  instant now{};
  while (!in.is_empty() && receiver.state() != receiver_state::failed) {
    now += in.below(256) * 100us;
    bytes datagram = of.packets[in.below(of.packets.size())];
    const std::size_t how = in.below(6);
    if (how == 1) datagram = in.take(in.value<std::uint16_t>() % 400);
    if (how >= 2) {  // some bytes of the header, and perhaps a good check
      const std::size_t at = in.below(56);
      const bytes changed = in.take(1 + in.below(8));
      std::copy_n(changed.begin(), std::min(changed.size(), 56 - at),
                  datagram.begin() + static_cast<std::ptrdiff_t>(at));
      if (how >= 4) datagram = sealed(std::move(datagram), 48);
      if (how == 5) datagram.resize(56 + in.below(256));
    }
    const bool is_good = std::ranges::find(of.packets, datagram) != of.packets.end();
    const receiver_state before = receiver.state();
    const std::uint64_t placed = receiver.counters().of(packet_fate::placed);
    const packet_fate fate = receiver.on_datagram(datagram, now);
    check(receiver.counters().of(fate) > 0, "each has a fate");
    check((receiver.counters().of(packet_fate::placed) != placed) == (fate == packet_fate::placed),
          "only what is placed counts");
    check((receiver.state() == receiver_state::failed) == (fate == packet_fate::inconsistent),
          "only what is inconsistent fails");
    if (before == receiver_state::frozen)
      check(fate != packet_fate::placed, "nothing is placed after the freeze");
    if (is_good && before == receiver_state::open)
      check(fate == packet_fate::placed || fate == packet_fate::duplicate, "a good packet is taken");
    while (!receiver.poll_control(now).empty()) {
    }
  }
  if (receiver.state() != receiver_state::frozen) return;
  // A packet may be changed in what no layout knows, its transmission and times, but not in its elements.
  check(holds_what_arrived(receiver, of.made.frame(), of.grid), "what arrived is what was sent");
  check(keeps_bound(receiver.arrived(), of.grid, 400'000), "no fragment is beyond its bound");
}

}  // namespace lamina_fuzz::of_packet
