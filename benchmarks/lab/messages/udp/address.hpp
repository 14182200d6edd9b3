// SPDX-License-Identifier: MIT
#pragma once

#include <sys/socket.h>

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// Addresses of IPv4 and IPv6, and which of its own a rank uses.
namespace lab {

/// An address and a port. Goes from rank to rank as it lies.
struct endpoint {
  std::array<std::uint8_t, 16> address{};  ///< of IPv4 the first four
  std::uint16_t port = 0;
  std::uint16_t is_v6 = 0;

  friend auto operator<=>(const endpoint&, const endpoint&) = default;
};

/// For the system's calls.
struct socket_address {
  sockaddr_storage bytes{};
  socklen_t length = sizeof(sockaddr_storage);

  socket_address() = default;
  explicit socket_address(const endpoint& from);
  /// Of another family than these two: all zeros.
  endpoint to_endpoint() const;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
};

/// "10.77.0.1:4000", "[fd00::1]:4000"; without a port the address alone.
std::string text_of(const endpoint& what);

/// Addresses that begin alike.
struct network {
  endpoint begin;
  unsigned bits = 0;

  bool has(const endpoint& address) const;
};
/// "10.77.0.0/24", "fd00::/64", or one address. Throws std::invalid_argument, naming it, for another text.
network parse_network(const std::string& text);

/// The local addresses of a rank, one for each path over which its packets go: of each network in `interfaces`, which commas separate,
/// the first that lies in it. Without any the first that is not loopback, or loopback if all ranks are on one machine.
/// Throws std::invalid_argument, naming the network and the addresses that there are.
std::vector<endpoint> local_paths(const std::string& interfaces, bool is_one_machine);

/// A rank has at most so many.
inline constexpr std::size_t most_paths = 8;

}  // namespace lab
