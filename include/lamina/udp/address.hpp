// SPDX-License-Identifier: MIT
#pragma once

/// Errors, file descriptors and addresses: what the other headers of lamina/udp need of the system. Read this first, then socket.hpp.

#if !defined(__linux__)
#error "lamina/udp needs Linux: it sends with sendmmsg and UDP_SEGMENT, and takes with recvmmsg and UDP_GRO"
#endif

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>

#include "lamina/bounded/rate.hpp"

namespace lamina::inline LAMINA_ABI::udp {

/// The system refused a call, or a peer broke the protocol: the sentence names the address or the peer. Mistakes of the caller are
/// std::invalid_argument and std::logic_error. All of lamina/udp needs exceptions.
class LAMINA_VISIBLE error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// These ranks closed their connections, fell silent, or did not do in time what was waited for.
class LAMINA_VISIBLE peers_lost : public error {
 public:
  peers_lost(const std::string& what, std::vector<std::size_t> ranks,
             std::vector<std::optional<delivery>> sent = {})
      : error(what), ranks_(std::move(ranks)), sent_(std::move(sent)) {}
  [[nodiscard]] const std::vector<std::size_t>& ranks() const noexcept { return ranks_; }
  /// What send_frame() would have returned, if it has begun to send: of the lost ranks nothing has arrived.
  [[nodiscard]] const std::vector<std::optional<delivery>>& sent() const noexcept { return sent_; }

 private:
  std::vector<std::size_t> ranks_;
  std::vector<std::optional<delivery>> sent_;
};

/// An address and a port. Port 0 is the system's choice.
struct endpoint {
  std::array<std::uint8_t, 16> address{};  ///< of IPv4 the first four bytes
  std::uint16_t port = 0;
  std::uint16_t is_v6 = 0;

  friend auto operator<=>(const endpoint&, const endpoint&) = default;
};

/// A rank has at most so many paths.
inline constexpr std::size_t most_paths = 8;

/// Where a rank is to be found: its control connection by TCP, and its packets by UDP on each path. Trivially copyable, so it may be
/// sent to other ranks byte by byte. All ranks of a run have as many paths, of one family.
struct rank_addresses {
  endpoint control;
  std::array<endpoint, most_paths> data{};
  std::uint32_t paths = 0;
  std::uint32_t reserved = 0;
};

/// "10.77.0.1:4000", "[fd00::1]:4000"; without a port the address only.
inline std::string text_of(const endpoint& what) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  ::inet_ntop(what.is_v6 != 0 ? AF_INET6 : AF_INET, what.address.data(), text.data(), text.size());
  if (what.port == 0) return text.data();
  const std::string address = what.is_v6 != 0 ? "[" + std::string(text.data()) + "]" : text.data();
  return address + ":" + std::to_string(what.port);
}

/// Where a rank is, in words: "10.77.0.1:4000", or one such address a path with commas between. Control is at the first. Throws
/// std::invalid_argument, naming what is no address with a port.
inline rank_addresses parse_addresses(const std::string& text) {
  rank_addresses all;
  for (std::size_t begin = 0, comma = 0; comma != std::string::npos; begin = comma + 1) {
    comma = text.find(',', begin);
    const std::string each = text.substr(begin, comma - begin);
    const std::size_t colon = each.rfind(':');
    std::string address = each.substr(0, colon);
    const bool is_v6 = address.starts_with('[') && address.ends_with(']');
    if (is_v6) address = address.substr(1, address.size() - 2);
    endpoint made;
    made.is_v6 = is_v6 ? 1 : 0;
    const bool is_address =
        ::inet_pton(is_v6 ? AF_INET6 : AF_INET, address.c_str(), made.address.data()) == 1;
    const char* const end = each.data() + each.size();
    const char* const port = colon == std::string::npos ? end : each.data() + colon + 1;
    const auto [last, failure] = std::from_chars(port, end, made.port);
    if (!is_address || failure != std::errc() || last != end)
      lamina::detail::refuse("'", each, "' is no address such as 10.77.0.1:4000 or [fd00::1]:4000");
    if (all.paths == most_paths) lamina::detail::refuse("more than ", most_paths, " paths");
    if (all.paths > 0 && made.is_v6 != all.data[0].is_v6)
      lamina::detail::refuse("paths of IPv4 and of IPv6: give one kind");
    all.data.at(all.paths++) = made;
  }
  all.control = all.data[0];
  return all;
}

namespace detail {

/// The time, as the state machines of lamina/bounded take it.
inline bounded::instant clock_now() {
  return std::chrono::steady_clock::now().time_since_epoch();
}

/// Owns a file descriptor, or none.
class descriptor {
 public:
  descriptor() = default;
  explicit descriptor(int number) noexcept : number_(number) {}
  descriptor(descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  descriptor& operator=(descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~descriptor() { close(); }

  [[nodiscard]] int get() const noexcept { return number_; }
  [[nodiscard]] bool is_open() const noexcept { return number_ >= 0; }
  void close() noexcept {
    if (is_open()) ::close(std::exchange(number_, -1));
  }

 private:
  int number_ = -1;
};

/// An error with the system's own words for errno, or for another number, after `what`.
[[noreturn]] inline void throw_system_error(const std::string& what, int number = errno) {
  throw error(what + ": " + std::generic_category().message(number));
}

/// An address of either family, which have the family and the port at the same place.
union either_address {
  sockaddr_in6 v6{};
  sockaddr_in v4;
  sockaddr any;
};
/// For the system's calls.
struct socket_address {
  either_address is;
  socklen_t length = sizeof(sockaddr_in6);

  socket_address() = default;
  explicit socket_address(const endpoint& from) {
    is.v6.sin6_port = htons(from.port);
    if (from.is_v6 != 0) {
      is.v6.sin6_family = AF_INET6;
      std::memcpy(&is.v6.sin6_addr, from.address.data(), sizeof is.v6.sin6_addr);
    } else {
      is.v6.sin6_family = AF_INET;
      std::memcpy(&is.v4.sin_addr, from.address.data(), sizeof is.v4.sin_addr);
      length = sizeof is.v4;
    }
  }
  [[nodiscard]] endpoint to_endpoint() const {
    endpoint to;
    to.port = ntohs(is.v6.sin6_port);
    if (is.v6.sin6_family == AF_INET6) {
      to.is_v6 = 1;
      std::memcpy(to.address.data(), &is.v6.sin6_addr, sizeof is.v6.sin6_addr);
    } else {
      std::memcpy(to.address.data(), &is.v4.sin_addr, sizeof is.v4.sin_addr);
    }
    return to;
  }
};

/// Binds a socket, and says where it is: the port may be the system's choice.
inline endpoint bind_to(int number, const endpoint& local, const char* protocol) {
  socket_address address(local);
  if (::bind(number, &address.is.any, address.length) != 0)
    throw_system_error(std::string(protocol) + " on the address " + text_of(local));
  if (::getsockname(number, &address.is.any, &address.length) != 0) throw_system_error("getsockname");
  return address.to_endpoint();
}

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI::udp
