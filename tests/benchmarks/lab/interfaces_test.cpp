// SPDX-License-Identifier: MIT
#include "messages/interfaces.hpp"

#include <stdexcept>
#include <string>

#include "catch.hpp"

using Catch::Matchers::Contains;
using lab::local_paths;
using lab::parse_network;
using lamina::udp::text_of;

TEST_CASE("addresses: networks are read, and others refused by name") {
  CHECK(parse_network("10.77.0.0/24").has(parse_network("10.77.0.255").begin));
  CHECK_FALSE(parse_network("10.77.0.0/24").has(parse_network("10.77.1.0").begin));
  CHECK_FALSE(parse_network("10.77.0.0/24").has(parse_network("::1").begin));
  CHECK(parse_network("fd00::/8").has(parse_network("fdff::1").begin));
  CHECK(parse_network("0.0.0.0/0").has(parse_network("1.2.3.4").begin));
  for (const char* bad :
       {"", "10.77.0", "10.77.0.0/33", "10.77.0.0/", "10.77.0.0/8x", "fd00::/129", "eth0"}) {
    INFO(bad);
    CHECK_THROWS_WITH(parse_network(bad), Contains("--interface: '" + std::string(bad) + "'"));
  }
  CHECK(text_of(parse_network("10.77.0.1").begin) == "10.77.0.1");
  CHECK_THROWS_WITH(
      local_paths("203.0.113.0/24", false),
      Contains("--interface 203.0.113.0/24: no address of this machine lies in it") && Contains("127.0.0.1"));
  CHECK(local_paths("127.0.0.0/8,127.0.0.1", false).paths == 2);
  lamina::udp::rank_addresses own;
  try {
    own = local_paths("", false);
  } catch (const std::invalid_argument&) {  // a machine that has loopback alone
  }
  if (own.paths > 0 && own.control.is_v6 == 0) {
    const std::string text = text_of(own.control);
    CHECK_THROWS_WITH(local_paths(text + "," + text + "/8", false),
                      Contains("is the address of a path already"));
  }
  CHECK_THROWS_WITH(local_paths("127.0.0.1,", true), Contains("--interface: ''"));
  CHECK_THROWS_WITH(local_paths("127.0.0.1,::1", true), Contains("IPv6"));
}
