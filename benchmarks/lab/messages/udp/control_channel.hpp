// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <lamina/bounded/bounded.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "messages/transport.hpp"
#include "messages/udp/descriptor.hpp"

namespace lab {

/// What the two ends of a connection let each other send.
struct channel_limits {
  lamina::bounded::control_limits incoming;  ///< of the grid of the frames that come
  lamina::bounded::control_limits outgoing;  ///< and of those that go, about which WANTED and STOP come

  const lamina::bounded::control_limits& of(lamina::bounded::control_type type) const {
    using lamina::bounded::control_type;
    return type == control_type::wanted || type == control_type::stop ? outgoing : incoming;
  }
};

/// Control messages over one TCP connection, which does not block. Memory grows with what has come, never with what is announced.
class control_channel {
 public:
  control_channel(descriptor connection, std::uint64_t secret, const channel_limits& limits);

  int descriptor_number() const { return connection_.get(); }
  bool is_open() const { return connection_.is_open(); }
  void close() { connection_.close(); }
  void leave_open() { connection_.leave_open(); }

  /// A whole message, copied.
  void put(std::span<const std::byte> message);
  /// MESSAGE, of which the bytes are not copied. Throws std::invalid_argument for more bytes than a length of 32 bits says.
  void put_message(message_kind kind, payload what);
  /// Writes what the system takes; false: the connection is lost.
  bool write();
  bool has_unsent() const { return !unsent_.empty(); }
  /// Messages of put_message() that are not gone whole.
  std::size_t unsent_messages() const { return unsent_messages_; }

  enum class arrival : std::uint8_t {
    message,  ///< message() has it, until the next read()
    nothing,  ///< yet
    held,     ///< a MESSAGE comes for which there is no room now
    closed,   ///< by the other end, or by the network
    refused,  ///< error() says why; nothing is to be read any more
  };
  /// Reads until a message is whole. `room` is what the body of a MESSAGE may have; more is left in the network.
  arrival read(std::size_t room);
  const lamina::bounded::control_message& message() const { return message_; }
  /// Of a MESSAGE that read() has just given.
  message_kind kind() const;
  /// The memory that it lies in, from `message_begin` on.
  std::shared_ptr<std::vector<std::byte>> take_message();
  const std::error_code& error() const { return error_; }
  /// Bytes that have come so far: a sign of life.
  std::uint64_t bytes_read() const { return bytes_read_; }
  /// What is kept for what comes.
  std::size_t capacity_bytes() const { return incoming_.capacity(); }

  /// Before the bytes of a MESSAGE: the header, and their kind.
  static constexpr std::size_t message_begin = lamina::bounded::control_header_bytes + sizeof(std::uint64_t);

 private:
  struct piece {
    std::vector<std::byte> own;  // or those of the payload
    payload what;
    std::vector<std::span<const std::byte>> rest;
    bool ends_message = false;
  };

  arrival begin_body(std::size_t room);
  arrival finish();
  void grow();

  descriptor connection_;
  channel_limits limits_;
  lamina::bounded::keyed_check check_;
  std::deque<piece> unsent_;
  std::size_t unsent_messages_ = 0;

  std::vector<std::byte> incoming_;  // the header, and of the body what has come and a step more
  std::size_t filled_ = 0;
  std::size_t wanted_ = lamina::bounded::control_header_bytes;
  lamina::bounded::control_header header_;
  lamina::bounded::control_message message_;
  std::error_code error_;
  std::uint64_t bytes_read_ = 0;
};

/// For a connection: no delay of small messages, the queue of control in switches (DSCP CS5), and an end after `timeout_ms` in which
/// nothing that was sent is acknowledged. Throws link_error.
void set_control_options(int connection, unsigned timeout_ms);

}  // namespace lab
