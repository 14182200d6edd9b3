// SPDX-License-Identifier: MIT
// Packets carry the class of their tag, control has its own, and one transfer goes behind the other.
#include "catch.hpp"
#include "raw_peer.hpp"

namespace lamina_test::classes_test {

namespace {

constexpr std::size_t raw = 1;

struct come_packet {
  bounded::packet_header header;
  std::uint8_t type_of_service = 0;
};

// The next one, of a socket with IP_RECVTOS; none if nothing comes in time.
std::optional<come_packet> next_packet(const raw_peer& peer, int timeout_ms) {
  const int at = peer.sockets.paths[0].descriptor_number();
  std::vector<std::byte> bytes(65536);
  alignas(cmsghdr) std::array<std::byte, 256> control{};
  iovec piece{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  pollfd ready{at, POLLIN, 0};
  if (poll(&ready, 1, timeout_ms) != 1) return std::nullopt;
  const ssize_t length = recvmsg(at, &message, 0);
  if (length < 0) return std::nullopt;
  std::error_code error;
  const std::span<const std::byte> come = bytes;
  come_packet read{bounded::read_packet_header(come.first(static_cast<std::size_t>(length)), error)};
  if (error) throw std::system_error(error);
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr; each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level == IPPROTO_IP && each->cmsg_type == IP_TOS)
      std::memcpy(&read.type_of_service, CMSG_DATA(each), 1);
  }
  return read;
}

}  // namespace

TEST_CASE("transport: a packet has the class of its position, and the precedence of what may be dropped") {
  ranks_given given;
  given.model = lamina::layout({{"a", {20'000}}, {"b", {20'000}}, {"c", {20'000}}, {"d", {20'000}}});
  given.has_tags = GENERATE(true, false);
  std::map<std::uint8_t, std::uint8_t> classes;
  std::uint8_t of_control = 0;
  const auto said = run_with_raw_peer(
      given, [&](udp::transport& ranks) { send_one(ranks, given, {raw}); },
      [&](raw_peer& peer) {
        const int yes = 1;
        REQUIRE(setsockopt(peer.path().descriptor_number(), IPPROTO_IP, IP_RECVTOS, &yes, sizeof yes) == 0);
        take_one_by_one(peer.path());
        peer.say_ready();
        while (const auto packet = next_packet(peer, 500))
          classes[packet->header.tag] = packet->type_of_service;
        int control = 0;
        socklen_t length = sizeof control;
        getsockopt(peer.channel.descriptor_number(), IPPROTO_IP, IP_TOS, &control, &length);
        of_control = static_cast<std::uint8_t>(control);
      });
  CHECK(said[1].empty());
  CHECK(of_control == 0xa0);
  std::map<std::uint8_t, std::uint8_t> expected = {{0, 0x88}, {1, 0x68}, {2, 0x48}, {3, 0x28},
                                                   {4, 0x98}, {5, 0x78}, {6, 0x58}, {7, 0x38}};
  if (!given.has_tags) {
    for (auto& [tag, type_of_service] : expected) type_of_service = 0;
  }
  for (const auto& [tag, type_of_service] : expected) {
    INFO("tag " << static_cast<int>(tag));
    CHECK(static_cast<int>(classes[tag]) == static_cast<int>(type_of_service));
  }
  CHECK(classes.size() == 8);
}

TEST_CASE("transport: who is sent to first has the link until it has all") {
  ranks_given given;
  given.link_bits = 10'000'000;  // a frame takes 150 ms
  std::promise<void> first_has_some;
  std::array<std::vector<std::uint32_t>, 2> sent_at;
  const auto said = run_started(3, given, [&](std::size_t r, udp::open_sockets here, const auto& all) {
    if (r == 0) {
      udp::transport over(std::move(here), all, options_of(given, r, 3));
      send_one(over, given, {2, 1});
      return;
    }
    raw_peer peer(given, std::move(here), all, static_cast<std::uint16_t>(r));
    take_one_by_one(peer.path());
    if (r == 1) {
      const bool is_first_served = first_has_some.get_future().wait_for(10s) == std::future_status::ready;
      if (!is_first_served) throw std::runtime_error("worker 1 got nothing");
    }
    peer.say_ready();
    while (const auto packet = next_packet(peer, 500)) {
      if (r == 2 && sent_at[1].empty()) first_has_some.set_value();
      sent_at[r - 1].push_back(packet->header.sent_at);
    }
  });
  CHECK(said[1] + said[2] == "");
  REQUIRE(sent_at[0].size() > 100);
  REQUIRE(sent_at[1].size() == sent_at[0].size());
  CHECK(*std::ranges::max_element(sent_at[1]) <= *std::ranges::min_element(sent_at[0]));
}

}  // namespace lamina_test::classes_test
