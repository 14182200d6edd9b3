// SPDX-License-Identifier: MIT
// Packets carry the class of their tag, and control has its own.
#include <netinet/in.h>
#include <netinet/udp.h>

#include <map>
#include <string>

#include "catch.hpp"
#include "classed_datagram.hpp"
#include "raw_peer.hpp"

namespace {

using namespace lamina_test;
using bounded::control_type;

constexpr std::size_t raw = 1;

}  // namespace

TEST_CASE(
    "udp_transport: a packet has the class of its position, and the precedence of what may be dropped") {
  ranks_given given;
  given.model = lamina::layout({{"a", {20'000}}, {"b", {20'000}}, {"c", {20'000}}, {"d", {20'000}}});
  given.has_tags = GENERATE(true, false);
  std::map<std::uint8_t, std::uint8_t> classes;
  std::uint8_t of_control = 0;
  const auto said = run_with_raw_peer(
      given,
      [&](udp_transport& ranks) {
        const test_frame down(given, lamina::frame_kind::parameters, 1, 1);
        ranks.send_frame({&raw, 1}, message_kind::parameters, down.outgoing(), {});
      },
      [&](raw_peer& peer) {
        const int yes = 1;
        REQUIRE(setsockopt(peer.path().descriptor_number(), IPPROTO_IP, IP_RECVTOS, &yes, sizeof yes) == 0);
        const int no =
            0;  // packets one by one: joined ones need not have the same tag where all have one class
        REQUIRE(setsockopt(peer.path().descriptor_number(), SOL_UDP, UDP_GRO, &no, sizeof no) == 0);
        peer.run_until(control_type::begin);
        peer.say(control_type::ready, peer.channel.message().header.transfer, 0, {0, 0, 1});
        while (const auto packet = next_datagram(peer.path(), 500)) {
          std::error_code error;
          const auto header = bounded::read_packet_header(packet->bytes, error);
          REQUIRE(!error);
          classes[header.tag] = packet->type_of_service;
        }
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
