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

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/bounded/rate.hpp"
#include "lamina/detail/abi.hpp"

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
  peers_lost(const std::string& what, std::vector<std::size_t> ranks)
      : error(what), ranks_(std::move(ranks)) {}
  [[nodiscard]] const std::vector<std::size_t>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<std::size_t> ranks_;
};

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

}  // namespace detail

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

namespace detail {

/// For the system's calls.
struct socket_address {
  sockaddr_storage bytes{};
  socklen_t length = sizeof(sockaddr_storage);

  socket_address() = default;
  explicit socket_address(const endpoint& from) {
    if (from.is_v6 != 0) {
      sockaddr_in6 v6{};
      v6.sin6_family = AF_INET6;
      v6.sin6_port = htons(from.port);
      std::memcpy(&v6.sin6_addr, from.address.data(), sizeof v6.sin6_addr);
      std::memcpy(&bytes, &v6, length = sizeof v6);
    } else {
      sockaddr_in v4{};
      v4.sin_family = AF_INET;
      v4.sin_port = htons(from.port);
      std::memcpy(&v4.sin_addr, from.address.data(), sizeof v4.sin_addr);
      std::memcpy(&bytes, &v4, length = sizeof v4);
    }
  }
  /// Of another family than these two: all zeros.
  [[nodiscard]] endpoint to_endpoint() const {
    endpoint to;
    if (bytes.ss_family == AF_INET6) {
      sockaddr_in6 v6{};
      std::memcpy(&v6, &bytes, sizeof v6);
      to.is_v6 = 1;
      to.port = ntohs(v6.sin6_port);
      std::memcpy(to.address.data(), &v6.sin6_addr, sizeof v6.sin6_addr);
    } else if (bytes.ss_family == AF_INET) {
      sockaddr_in v4{};
      std::memcpy(&v4, &bytes, sizeof v4);
      to.port = ntohs(v4.sin_port);
      std::memcpy(to.address.data(), &v4.sin_addr, sizeof v4.sin_addr);
    }
    return to;
  }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
};

/// Binds a socket, and says where it is: the port may be the system's choice.
inline endpoint bind_to(int number, const endpoint& local, const char* protocol) {
  socket_address address(local);
  if (::bind(number, address.get(), address.length) != 0)
    throw_system_error(std::string(protocol) + " on the address " + text_of(local));
  address.length = sizeof(sockaddr_storage);
  if (::getsockname(number, address.get(), &address.length) != 0) throw_system_error("getsockname");
  return address.to_endpoint();
}

inline bool read_address(const std::string& text, endpoint& to) {
  to.is_v6 = text.find(':') != std::string::npos ? 1 : 0;
  return ::inet_pton(to.is_v6 != 0 ? AF_INET6 : AF_INET, text.c_str(), to.address.data()) == 1;
}
template <class Number>
bool read_digits(std::string_view text, Number& to) {
  const auto [last, failure] = std::from_chars(text.data(), text.data() + text.size(), to);
  return failure == std::errc() && last == text.data() + text.size();
}

inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> pieces;
  std::size_t begin = 0;
  for (std::size_t comma = 0; comma != std::string::npos; begin = comma + 1) {
    comma = text.find(',', begin);
    pieces.push_back(text.substr(begin, comma - begin));
  }
  return pieces;
}

inline rank_addresses addresses_of(const std::vector<endpoint>& paths) {
  if (paths.size() > most_paths)
    throw std::invalid_argument(std::to_string(paths.size()) + " paths: a rank has at most " +
                                std::to_string(most_paths));
  if (std::ranges::any_of(paths, [&](const endpoint& each) { return each.is_v6 != paths[0].is_v6; }))
    throw std::invalid_argument("paths of IPv4 and of IPv6: give one kind");
  rank_addresses all;
  all.control = paths[0];
  all.paths = static_cast<std::uint32_t>(paths.size());
  std::ranges::copy(paths, all.data.begin());
  return all;
}

}  // namespace detail

/// Where a rank is, in words: "10.77.0.1:4000", or one such address a path with commas between. Control is at the first. Throws
/// std::invalid_argument, naming what is no address with a port.
inline rank_addresses parse_addresses(const std::string& text) {
  std::vector<endpoint> paths;
  for (const std::string& each : detail::split(text)) {
    const std::size_t colon = each.rfind(':');
    std::string address = each.substr(0, colon);
    const bool is_bracketed = address.starts_with('[') && address.ends_with(']');
    if (is_bracketed) address = address.substr(1, address.size() - 2);
    endpoint& made = paths.emplace_back();
    if (colon == std::string::npos || !detail::read_address(address, made) ||
        (made.is_v6 != 0) != is_bracketed || !detail::read_digits(each.substr(colon + 1), made.port)) {
      throw std::invalid_argument("'" + each + "' is no address such as 10.77.0.1:4000 or [fd00::1]:4000");
    }
  }
  return detail::addresses_of(paths);
}

}  // namespace lamina::inline LAMINA_ABI::udp
