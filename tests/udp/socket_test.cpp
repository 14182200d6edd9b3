// SPDX-License-Identifier: MIT
// One path of packets, from one socket to another over loopback.
#include "lamina/udp/socket.hpp"

#include <set>

#include "catch.hpp"
#include "ranks.hpp"

namespace lamina_test::socket_test {

namespace {

using Catch::Matchers::Contains;
using datagram = std::vector<std::byte>;

/// Packets whose bytes lie here: packet i has its number in its header, and data of two pieces.
class packets {
 public:
  packets(std::size_t count, const std::vector<std::size_t>& sizes) {
    for (std::size_t i = 0; i < count; ++i) {
      auto& data = data_.emplace_back(sizes[i % sizes.size()], static_cast<std::byte>(i));
      bounded::outgoing_packet& made = all.emplace_back();
      std::memcpy(made.header.data(), &i, sizeof i);
      const std::span<const std::byte> bytes = data;
      made.data = {bytes.first(bytes.size() / 3), bytes.subspan(bytes.size() / 3)};
    }
  }
  std::set<datagram> expected() const {
    std::set<datagram> bytes;
    for (const bounded::outgoing_packet& each : all) bytes.insert(joined(each));
    return bytes;
  }

  std::vector<bounded::outgoing_packet> all;

 private:
  std::vector<datagram> data_;
};

void send_all(udp::packet_socket& from, const udp::packet_socket& to, const packets& what) {
  for (const bounded::outgoing_packet& each : what.all) {
    if (!from.has_room()) REQUIRE(from.flush());
    from.put(to.local(), each, 0x88);
  }
  REQUIRE(from.flush());
}

/// All that comes until nothing does for a while.
std::vector<datagram> receive_all(udp::packet_socket& at, const endpoint& expected_from) {
  std::vector<datagram> come;
  pollfd ready{at.descriptor_number(), POLLIN, 0};
  while (poll(&ready, 1, 200) > 0) {
    at.receive(512, [&](const endpoint& from, std::span<const std::byte> bytes, bounded::instant arrived_at) {
      CHECK(arrived_at <= clock_now());
      CHECK(arrived_at > clock_now() - 1s);
      CHECK(from == expected_from);
      come.emplace_back(bytes.begin(), bytes.end());
    });
  }
  return come;
}

std::set<datagram> set_of(const std::vector<datagram>& all) {
  return {all.begin(), all.end()};
}

// As where the device cannot segment: the kernel refuses a message of several datagrams without checksums.
void forbid_segments(const udp::packet_socket& at) {
  const int yes = 1;
  REQUIRE(setsockopt(at.descriptor_number(), SOL_SOCKET, SO_NO_CHECK, &yes, sizeof yes) == 0);
}

}  // namespace

TEST_CASE("packet_socket: packets arrive as they were put, taken joined or each by itself") {
  const bool takes_joined = GENERATE(true, false);
  udp::packet_socket from(loopback());
  udp::packet_socket to(loopback());
  if (!takes_joined) take_one_by_one(to);
  const packets sent(300, {1408, 1408, 28, 1408});
  send_all(from, to, sent);
  const auto come = receive_all(to, from.local());
  CHECK(come.size() == 300);
  CHECK(set_of(come) == sent.expected());
  CHECK(from.joins_segments());
  CHECK(from.counters().sent == 300);
}

TEST_CASE("packet_socket: where messages of several datagrams are refused, each goes by itself") {
  udp::packet_socket from(loopback()), to(loopback());
  forbid_segments(from);
  send_all(from, to, packets(1, {1408}));  // no message of several: nothing is switched off
  CHECK(from.joins_segments());
  CHECK(receive_all(to, from.local()).size() == 1);
  const packets sent(100, {1408});
  send_all(from, to, sent);
  CHECK_FALSE(from.joins_segments());
  CHECK(set_of(receive_all(to, from.local())) == sent.expected());
  CHECK(from.counters().unsent == 0);
}

TEST_CASE("packet_socket: packets have arrived when the system got them, not when they were read") {
  udp::packet_socket from(loopback()), to(loopback());
  const bounded::instant sent_at = clock_now();
  send_all(from, to, packets(1, {100}));
  std::this_thread::sleep_for(300ms);
  to.receive(1, [&](const endpoint&, std::span<const std::byte>, bounded::instant arrived_at) {
    CHECK(arrived_at >= sent_at);
    CHECK(arrived_at < clock_now() - 200ms);
  });
}

TEST_CASE("packet_socket: injected loss is of its share, and repeats by its seed") {
  const auto arrived = [](std::uint64_t seed) {
    udp::packet_socket from(loopback(), {.inject_loss = 0.2, .inject_seed = seed});
    udp::packet_socket to(loopback(), {});
    const packets sent(1000, {16});
    send_all(from, to, sent);
    CHECK(from.counters().sent == 1000);
    auto come = receive_all(to, from.local());
    CHECK(from.counters().injected + come.size() == 1000);
    return set_of(come);
  };
  const auto first = arrived(1);
  CHECK(first.size() > 740);
  CHECK(first.size() < 860);
  CHECK(arrived(1) == first);
  CHECK(arrived(2) != first);
}

TEST_CASE("packet_socket: a packet beyond the MTU ends it, and both are named") {
  udp::packet_socket from(loopback(), {});
  const udp::packet_socket to(loopback(), {});
  const packets sent(1, {65'500});
  from.put(to.local(), sent.all[0], 0);
  CHECK_THROWS_WITH(from.flush(), Contains("a packet of 65584 bytes is beyond the MTU of ") &&
                                      Contains("127.0.0.1:" + std::to_string(to.local().port)) &&
                                      Contains("set an mtu"));
}

TEST_CASE("packet_socket: the network may not cut packets into fragments") {
  const udp::packet_socket four(loopback()), six(loopback("::1"));
  int found = 0;
  socklen_t size = sizeof found;
  REQUIRE(getsockopt(four.descriptor_number(), IPPROTO_IP, IP_MTU_DISCOVER, &found, &size) == 0);
  CHECK(found == IP_PMTUDISC_DO);
  REQUIRE(getsockopt(six.descriptor_number(), IPPROTO_IPV6, IPV6_MTU_DISCOVER, &found, &size) == 0);
  CHECK(found == IPV6_PMTUDISC_DO);
}

TEST_CASE("packet_socket: what waits for one receiver is dropped, and the other's goes") {
  udp::packet_socket from(loopback(), {});
  udp::packet_socket first(loopback(), {});
  udp::packet_socket second(loopback(), {});
  const packets sent(20, {64});
  for (const bounded::outgoing_packet& each : sent.all) {
    from.put(first.local(), each, 0);
    from.put(second.local(), each, 0);
  }
  from.drop(first.local());
  REQUIRE(from.flush());
  CHECK(receive_all(first, from.local()).empty());
  CHECK(receive_all(second, from.local()).size() == 20);
}

TEST_CASE("packet_socket: what this end does not take in time is told apart from what the network loses") {
  udp::packet_socket from(loopback(), {});
  udp::packet_socket to(loopback());
  take_one_by_one(to);  // they are counted as they came
  const packets sent(20'000, {1408});
  send_all(from, to, sent);
  std::size_t come = receive_all(to, from.local()).size();
  send_all(from, to, packets(1, {8}));  // which says how many before it were dropped
  come += receive_all(to, from.local()).size();
  CHECK(come < 20'001);
  CHECK(to.counters().overrun + come == 20'001);
}

TEST_CASE("packet_socket: a share of losses that is none is refused") {
  for (const double share : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()})
    CHECK_THROWS_WITH(udp::packet_socket(loopback(), {.inject_loss = share}), Contains("[0, 1]"));
}

TEST_CASE("addresses: they are read and written, and others refused by name") {
  for (const char* text : {"10.77.0.1:4000", "[fd00::1]:4000"})
    CHECK(udp::text_of(udp::parse_addresses(text).control) == text);
  const udp::rank_addresses two = udp::parse_addresses("10.77.0.1:4000,10.78.0.1:0");
  CHECK(two.paths == 2);
  CHECK(two.control == two.data[0]);
  CHECK(udp::text_of(two.data[1]) == "10.78.0.1");
  for (const char* bad : {"", "10.77.0.1", "10.77.0.1:", "10.77.0.1:x", "10.77.0.1:65536", "10.77.0:1",
                          "fd00::1:4000", "[10.77.0.1]:4000", "host:4000", "10.77.0.1:4000,"}) {
    INFO(bad);
    CHECK_THROWS_WITH(udp::parse_addresses(bad), Contains("is no address such as"));
  }
  CHECK_THROWS_WITH(udp::parse_addresses("127.0.0.1:0,[::1]:0"), Contains("IPv6"));
  CHECK_THROWS_WITH(
      udp::parse_addresses(
          "1.1.1.1:0,1.1.1.1:0,1.1.1.1:0,1.1.1.1:0,1.1.1.1:0,1.1.1.1:0,1.1.1.1:0,1.1.1.1:0,1.1.1.1:0"),
      Contains("more than 8 paths"));
  CHECK_THROWS_WITH(udp::open_sockets(udp::parse_addresses("203.0.113.1:0")),
                    Contains("TCP on the address 203.0.113.1"));
}

}  // namespace lamina_test::socket_test
