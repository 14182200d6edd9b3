// SPDX-License-Identifier: MIT
#pragma once

#include <lamina/udp/address.hpp>
#include <string>

/// Which of its own addresses a rank uses for packets: --interface.
namespace lab {

/// Addresses that begin alike.
struct network {
  lamina::udp::endpoint begin;
  unsigned bits = 0;

  bool has(const lamina::udp::endpoint& address) const;
};
/// "10.77.0.0/24", "fd00::/64", or one address. Throws std::invalid_argument, naming it, for another text.
network parse_network(const std::string& text);

/// The local addresses of a rank, one for each path: of each network in `interfaces`, which commas separate, the first that lies in it.
/// Without any the first that is not loopback, or loopback if all ranks are on one machine. Throws std::invalid_argument, naming the
/// network and the addresses that there are.
lamina::udp::rank_addresses local_paths(const std::string& interfaces, bool is_one_machine);

}  // namespace lab
