// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "messages/udp/address.hpp"
#include "messages/udp/meeting.hpp"
#include "messages/udp/udp_socket.hpp"

namespace lab {

/// What one rank opens before it meets the others: a socket of packets a path, and where it listens for control.
struct open_sockets {
  std::vector<udp_socket> paths;
  listener control;
};
/// On these local addresses, of which control takes the first. Each path loses other packets. Throws link_error.
open_sockets open_paths(const std::vector<endpoint>& local, const udp_socket_options& options);

/// Where a rank is to be found. Goes to the other ranks as it lies.
struct rank_addresses {
  endpoint control;
  std::array<endpoint, most_paths> data{};
  std::uint32_t paths = 0;
  std::uint32_t reserved = 0;
};
rank_addresses addresses_of(const open_sockets& here);
/// 64 bits of the system's. Throws link_error.
std::uint64_t make_secret();

}  // namespace lab
