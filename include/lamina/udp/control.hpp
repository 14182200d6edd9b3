// SPDX-License-Identifier: MIT
#pragma once

/// Control messages over one TCP connection of two ranks. Read after socket.hpp, before meeting.hpp.

#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/bounded/control.hpp"
#include "lamina/bounded/error.hpp"
#include "lamina/bounded/packet.hpp"
#include "lamina/udp/socket.hpp"

namespace lamina::inline LAMINA_ABI::udp {

namespace detail {

/// What the two ends of a connection let each other send.
struct channel_limits {
  bounded::control_limits incoming;  ///< of the grid of the frames that come
  bounded::control_limits outgoing;  ///< and of those that go, about which WANTED and STOP come

  [[nodiscard]] const bounded::control_limits& of(bounded::control_type type) const noexcept {
    const bool is_answer = type == bounded::control_type::wanted || type == bounded::control_type::stop;
    return is_answer ? outgoing : incoming;
  }
};

/// Control messages over a stream that does not block. Memory grows with what has come, never with what is announced.
class control_channel {
 public:
  control_channel(descriptor connection, std::uint64_t secret, const channel_limits& limits)
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
    unsent_.push_back({{message.begin(), message.end()}, false});
  }
  /// MESSAGE, copied as well. Throws std::invalid_argument for more bytes than a length of 32 bits says.
  void put_message(std::uint64_t tag, std::span<const std::byte> bytes) {
    if (bytes.size() > (std::numeric_limits<std::uint32_t>::max)() - sizeof tag)
      throw std::invalid_argument("a message of " + std::to_string(bytes.size()) + " bytes: at most 4 GiB");
    bounded::control_header header{.body_bytes = static_cast<std::uint32_t>(sizeof tag + bytes.size()),
                                   .type = bounded::control_type::message};
    header.check =
        check_.of({std::as_bytes(std::span(&header, 1)).first(offsetof(bounded::control_header, check)),
                   std::as_bytes(std::span(&tag, 1)), bytes});
    std::vector<std::byte> all(message_begin + bytes.size());
    std::memcpy(all.data(), &header, sizeof header);
    std::memcpy(all.data() + sizeof header, &tag, sizeof tag);
    std::ranges::copy(bytes, all.begin() + message_begin);
    unsent_.push_back({std::move(all), true});
  }
  /// Writes what the system takes; false: the connection is lost.
  bool write() {
    while (!unsent_.empty()) {
      const std::vector<std::byte>& first = unsent_.front().bytes;
      const ssize_t sent = ::send(connection_.get(), first.data() + written_, first.size() - written_,
                                  MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
      written_ += static_cast<std::size_t>(sent);
      if (written_ < first.size()) continue;
      unsent_.pop_front();
      written_ = 0;
    }
    return true;
  }
  [[nodiscard]] bool has_unsent() const noexcept { return !unsent_.empty(); }
  /// Whether a message of put_message() is not gone whole.
  [[nodiscard]] bool has_unsent_message() const noexcept {
    return std::ranges::any_of(unsent_, &piece::is_message);
  }

  enum class arrival : std::uint8_t {
    message,  ///< message() has it, until the next read()
    nothing,  ///< yet
    held,     ///< a MESSAGE comes for which there is no room now
    closed,   ///< by the other end, or by the network
    refused,  ///< failure() says why; nothing is to be read any more
  };
  /// Reads until a message is whole. `room` is what the body of a MESSAGE may have; a longer one stays in the network.
  arrival read(std::size_t room) {
    if (failure_) return arrival::refused;
    for (std::size_t taken_now = 0; taken_now <= most_bytes_a_read;) {
      if (filled_ == wanted_ && wanted_ == bounded::control_header_bytes) {
        const arrival begun = begin_body(room);
        if (begun != arrival::message) return begun;
      }
      if (filled_ == wanted_) return finish();
      const std::size_t count = (std::min)(wanted_, incoming_.size()) - filled_;
      const ssize_t taken = ::recv(connection_.get(), incoming_.data() + filled_, count, MSG_DONTWAIT);
      if (taken == 0) return arrival::closed;
      if (taken < 0) {
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? arrival::nothing : arrival::closed;
      }
      filled_ += static_cast<std::size_t>(taken);
      taken_now += static_cast<std::size_t>(taken);
      bytes_read_ += static_cast<std::uint64_t>(taken);
      if (filled_ == incoming_.size() && filled_ < wanted_) grow();
    }
    return arrival::nothing;  // others want to be read as well
  }
  [[nodiscard]] const bounded::control_message& message() const noexcept { return message_; }
  /// Of a MESSAGE that read() has just given: its tag, and the memory that it lies in, from `message_begin` on.
  [[nodiscard]] std::uint64_t tag() const noexcept {
    std::uint64_t tag = 0;
    std::memcpy(&tag, message_.body.data(), sizeof tag);
    return tag;
  }
  std::shared_ptr<std::vector<std::byte>> take_message() {
    incoming_.resize(bounded::control_header_bytes + message_.body.size());
    auto taken = std::make_shared<std::vector<std::byte>>(std::exchange(incoming_, {}));
    incoming_.resize(bounded::control_header_bytes);
    return taken;
  }
  [[nodiscard]] const std::error_code& failure() const noexcept { return failure_; }
  /// Bytes that have come so far: a sign of life.
  [[nodiscard]] std::uint64_t bytes_read() const noexcept { return bytes_read_; }
  /// What is kept for what comes.
  [[nodiscard]] std::size_t capacity_bytes() const noexcept { return incoming_.capacity(); }

  /// Before the bytes of a MESSAGE: the header, and their tag.
  static constexpr std::size_t message_begin = bounded::control_header_bytes + sizeof(std::uint64_t);

 private:
  static constexpr std::size_t growth_bytes = std::size_t{16} << 20;
  static constexpr std::size_t most_bytes_a_read = std::size_t{4} << 20;

  struct piece {
    std::vector<std::byte> bytes;
    bool is_message = false;
  };

  // The header is there: how much follows.
  arrival begin_body(std::size_t room) {
    const std::span<const std::byte> bytes(incoming_.data(), bounded::control_header_bytes);
    const auto type = static_cast<bounded::control_type>(bytes[offsetof(bounded::control_header, type)]);
    header_ = bounded::read_control_header(bytes, limits_.of(type), failure_);
    const bool is_message = header_.type == bounded::control_type::message;
    if (!failure_ && is_message && header_.body_bytes < sizeof(std::uint64_t))
      failure_ = bounded::bounded_errc::wrong_length;
    if (failure_) return arrival::refused;
    if (is_message && header_.body_bytes > room) return arrival::held;
    wanted_ = bounded::control_header_bytes + header_.body_bytes;
    if (incoming_.size() < wanted_) grow();
    return arrival::message;
  }
  void grow() { incoming_.resize((std::min)(wanted_, filled_ + (std::max)(growth_bytes, filled_))); }
  arrival finish() {
    const std::span<const std::byte> whole(incoming_.data(), wanted_);
    message_ = bounded::read_control(whole, limits_.of(header_.type), check_, failure_);
    filled_ = 0;
    wanted_ = bounded::control_header_bytes;
    return failure_ ? arrival::refused : arrival::message;
  }

  descriptor connection_;
  channel_limits limits_;
  bounded::keyed_check check_;
  std::deque<piece> unsent_;
  std::size_t written_ = 0;  // of the first

  std::vector<std::byte> incoming_;  // the header, and of the body what has come and a step more
  std::size_t filled_ = 0;
  std::size_t wanted_ = bounded::control_header_bytes;
  bounded::control_header header_;
  bounded::control_message message_;
  std::error_code failure_;
  std::uint64_t bytes_read_ = 0;
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
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  if (::getsockname(connection, reinterpret_cast<sockaddr*>(&local), &length) != 0)
    throw_system_error("getsockname");
  const bool is_v6 = local.ss_family == AF_INET6;
  set_option(connection, is_v6 ? IPPROTO_IPV6 : IPPROTO_IP, is_v6 ? IPV6_TCLASS : IP_TOS, class_selector_5,
             "the class of control");
}

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI::udp
