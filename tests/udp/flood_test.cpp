// SPDX-License-Identifier: MIT
// A flood of packets that mean nothing adds no memory, and the run goes on.
#include "counted_allocations.hpp"

#include <future>
#include <string>
#include <vector>

#include "catch.hpp"
#include "raw_peer.hpp"

namespace lamina_test::flood_test {

namespace {

using bounded::control_type;

constexpr std::size_t raw = 1;
constexpr std::size_t packets_of_a_kind = 150'000;

// Reports and what else comes meanwhile mean nothing here.
void await_pong(raw_peer& peer) {
  peer.say(control_type::ping, 0, 0, {0, 0});
  for (;;) {
    const auto come = peer.channel.read();
    if (come == control_channel::arrival::nothing) continue;
    if (come != control_channel::arrival::message) throw udp::error("the server has gone");
    if (peer.channel.message().header.type == control_type::pong) return;
  }
}

// In bursts that the socket's buffer has room for, each of which the server has read when it answers the second PING: what the
// kernel drops it does not see.
void flood(raw_peer& peer, udp::packet_socket& from, const bounded::outgoing_packet& packet) {
  constexpr std::size_t burst = 1'000;
  for (std::size_t i = 0; i < packets_of_a_kind; ++i) {
    if (!from.has_room()) from.flush();
    from.put(peer.server, packet, 0);
    if (i % burst != 0) continue;
    from.flush();
    for (int ping = 0; ping < 2; ++ping) await_pong(peer);
  }
  from.flush();
}

bounded::outgoing_packet changed(const bounded::outgoing_packet& packet, bool has_good_check,
                                 void (*change)(bounded::packet_header&)) {
  std::error_code error;
  bounded::packet_header header = bounded::read_packet_header(packet.header, error);
  change(header);
  bounded::keyed_check check(has_good_check ? run_secret : run_secret + 1);
  bounded::outgoing_packet made = packet;
  made.header = bounded::write_packet_header(header, packet.data, check);
  return made;
}

}  // namespace

TEST_CASE("udp flood: packets of every kind that mean nothing add no memory, and nothing ends") {
  const ranks_given given;
  udp::transport_counters counted;
  std::size_t added_bytes = 0;
  std::promise<void> flooded;
  const auto said = run_with_raw_peer(
      given,
      [&](udp::transport& ranks) {
        ranks.receive_from_each({&raw, 1});
        flooded.get_future().wait_for(60s);  // until it asks for the next one, what comes is late
        ranks.receive_from_each({&raw, 1});
        counted = ranks.counters();
      },
      [&](raw_peer& peer) {
        const test_frame frame(given, lamina::frame_kind::gradients, 1, 1);
        udp::packet_socket stranger(loopback());
        peer.sender.begin(frame.chunks());
        peer.run_until(control_type::ready);
        peer.sender.on_control(peer.channel.message());
        const bounded::outgoing_packet good = *peer.sender.next_packet(clock_now());
        const auto malformed = changed(good, true, [](bounded::packet_header& header) { ++header.magic; });
        const auto stale = changed(good, true, [](bounded::packet_header& header) { header.transfer += 9; });
        const auto foreign = changed(good, true, [](bounded::packet_header& header) { header.receiver = 5; });
        const auto bad_check = changed(good, false, [](bounded::packet_header&) {});
        const std::size_t before = allocated_bytes;
        flood(peer, peer.path(), malformed);
        flood(peer, peer.path(), stale);
        flood(peer, peer.path(), foreign);
        flood(peer, peer.path(), bad_check);
        flood(peer, peer.path(), good);
        flood(peer, stranger, good);
        added_bytes = allocated_bytes - before;
        peer.run_until(control_type::stop);
        peer.sender.on_control(peer.channel.message());
        const std::size_t frozen = allocated_bytes;
        flood(peer, peer.path(), good);
        added_bytes += allocated_bytes - frozen;
        flooded.set_value();
        peer.sender.begin(frame.chunks());
        peer.run([](const bounded::control_message& come) { return come.header.type == control_type::bye; });
      });
  CHECK(said[0] == "");
  CHECK(said[1] == "");
  CHECK(counted.foreign > 0);
  using bounded::packet_fate;
  for (const packet_fate fate : {packet_fate::malformed, packet_fate::stale, packet_fate::foreign,
                                 packet_fate::bad_check, packet_fate::duplicate, packet_fate::late}) {
    INFO(static_cast<int>(fate));
    CHECK(counted.peers.at(0).taken.of(fate) > 0);
  }
  // Reports and pings of these seconds, where one byte a packet would be a million.
  INFO(added_bytes);
  CHECK(added_bytes < 900'000);
}

}  // namespace lamina_test::flood_test
