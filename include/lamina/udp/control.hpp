// SPDX-License-Identifier: MIT
#pragma once

/// Control messages over one TCP connection of two ranks. Read after socket.hpp, before meeting.hpp.

#include <netinet/tcp.h>

#include "lamina/udp/socket.hpp"

namespace lamina::inline LAMINA_ABI::udp::detail {

/// Control messages over a stream that does not block. Its memory is bounded by `limits`.
class control_channel {
 public:
  control_channel(descriptor connection, std::uint64_t secret, const bounded::control_limits& limits)
      : connection_(std::move(connection)),
        limits_(limits),
        check_(secret),
        incoming_(bounded::control_header_bytes) {}

  [[nodiscard]] int descriptor_number() const noexcept { return connection_.get(); }
  void close() noexcept { connection_.close(); }
  /// The connection, which this is then without.
  [[nodiscard]] descriptor take_connection() noexcept { return std::move(connection_); }

  /// A whole message, copied.
  void put(std::span<const std::byte> message) {
    unsent_.insert(unsent_.end(), message.begin(), message.end());
  }
  /// Writes what the system takes; false: the connection is lost.
  bool write() {
    std::span<const std::byte> rest = unsent_;
    while (!rest.empty()) {
      const ssize_t sent = ::send(connection_.get(), rest.data(), rest.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
      if (sent < 0) break;
      rest = rest.subspan(static_cast<std::size_t>(sent));
    }
    unsent_.erase(unsent_.begin(), unsent_.end() - static_cast<std::ptrdiff_t>(rest.size()));
    return true;
  }
  [[nodiscard]] bool has_unsent() const noexcept { return !unsent_.empty(); }

  enum class arrival : std::uint8_t {
    message,  ///< message() has it, until the next read()
    nothing,  ///< yet
    closed,   ///< by the other end, or by the network
    refused,  ///< failure() says why; nothing is to be read any more
  };
  /// Reads until a message is whole.
  arrival read() {
    if (failure_) return arrival::refused;
    if (filled_ == incoming_.size()) {  // the message of the last call
      filled_ = 0;
      incoming_.resize(bounded::control_header_bytes);
    }
    while (filled_ < incoming_.size()) {
      const ssize_t taken =
          ::recv(connection_.get(), incoming_.data() + filled_, incoming_.size() - filled_, MSG_DONTWAIT);
      if (taken < 0 && errno == EINTR) continue;
      if (taken < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return arrival::nothing;
      if (taken <= 0) return arrival::closed;
      filled_ += static_cast<std::size_t>(taken);
      has_heard_ = true;
      if (filled_ != bounded::control_header_bytes) continue;
      const auto header = bounded::read_control_header(incoming_, limits_, failure_);
      if (failure_) return arrival::refused;
      incoming_.resize(bounded::control_header_bytes + header.body_bytes);
    }
    message_ = bounded::read_control(incoming_, limits_, check_, failure_);
    return failure_ ? arrival::refused : arrival::message;
  }
  [[nodiscard]] const bounded::control_message& message() const noexcept { return message_; }
  [[nodiscard]] const std::error_code& failure() const noexcept { return failure_; }
  /// Whether bytes have come since this was asked last: a sign of life.
  [[nodiscard]] bool has_heard() noexcept { return std::exchange(has_heard_, false); }

 private:
  descriptor connection_;
  bounded::control_limits limits_;
  bounded::keyed_check check_;
  std::vector<std::byte> unsent_;
  std::vector<std::byte> incoming_;  // the header; once that has come, as long as the message
  std::size_t filled_ = 0;
  bounded::control_message message_;
  std::error_code failure_;
  bool has_heard_ = false;
};

/// For a connection: no delay of small messages, the class of control in switches (DSCP CS5), and an end after `timeout_ms` in which
/// nothing that was sent is acknowledged. Throws error.
inline void set_control_options(int connection, unsigned timeout_ms) {
  constexpr int class_selector_5 = 0xa0;
  constexpr int least_timeout_option = 45;  // TCP_RTO_MIN_US, which older headers do not name
  set_option(connection, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  set_option(connection, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>((std::min)(timeout_ms, 0x7fffffffU)),
             "TCP_USER_TIMEOUT");
  // A TICK after a message shows that it was lost, but not that it was lost again: until something is acknowledged TCP lets no third
  // segment out, and waits for its timer, 200 ms at least. Systems before Linux 6.15 have no other; the route's rto_min helps there.
  // Two ticks of the system's clock are the least that it takes.
  for (const int microseconds : {5'000, 20'000}) {
    if (::setsockopt(connection, IPPROTO_TCP, least_timeout_option, &microseconds, sizeof microseconds) == 0)
      break;
  }
  const int service = class_selector_5;
  if (::setsockopt(connection, IPPROTO_IPV6, IPV6_TCLASS, &service, sizeof service) != 0)  // not of IPv6
    set_option(connection, IPPROTO_IP, IP_TOS, service, "the class of control");
}

}  // namespace lamina::inline LAMINA_ABI::udp::detail
