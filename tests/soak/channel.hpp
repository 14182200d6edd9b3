// SPDX-License-Identifier: MIT
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace soak {

/// No wait in this program is longer. A round takes milliseconds; the rest is for a machine that does much else.
inline constexpr std::chrono::seconds deadline{60};

/// The process at the other end is gone: fail-stop, and no failure of this process.
struct peer_lost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class message_kind : std::uint32_t { audit = 1, gradients, lost_send, parameters, arrived, go_on };

/// `replica` is the hash of what the sender holds as parameters.
struct message_header {
  message_kind kind{};
  std::uint32_t reserved = 0;
  std::uint64_t round = 0;
  std::uint64_t replica = 0;
  std::uint64_t bytes = 0;
};

/// Messages over one end of a socket pair. Every call throws peer_lost at the end of the stream, and
/// std::runtime_error, with the peer's name, after the deadline.
class channel {
 public:
  channel(int descriptor, std::string peer) : descriptor_(descriptor), peer_(std::move(peer)) {}
  channel(channel&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)), peer_(std::move(other.peer_)) {}
  channel& operator=(channel&&) = delete;
  ~channel() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  int descriptor() const noexcept { return descriptor_; }
  const std::string& peer() const noexcept { return peer_; }

  void send(message_kind kind, std::uint64_t round, std::uint64_t replica,
            std::span<const std::span<const std::byte>> segments) {
    message_header header{kind, 0, round, replica, 0};
    for (const auto segment : segments) header.bytes += segment.size();
    write_all(std::as_bytes(std::span(&header, 1)));
    for (const auto segment : segments) write_all(segment);
  }
  void send(message_kind kind, std::uint64_t round, std::uint64_t replica,
            std::initializer_list<std::span<const std::byte>> segments = {}) {
    send(kind, round, replica, std::span(segments.begin(), segments.size()));
  }

  /// The next message; its body is valid until the next call.
  std::pair<message_header, std::span<const std::byte>> receive() {
    message_header header;
    read_all(std::as_writable_bytes(std::span(&header, 1)));
    if (header.bytes > most_bytes)
      throw std::runtime_error("a message of " + std::to_string(header.bytes) + " bytes from " + peer_);
    if (body_.size() < header.bytes) body_.resize(header.bytes);
    const auto body = std::span(body_).first(header.bytes);
    read_all(body);
    return {header, body};
  }
  /// The next message, which must be of this kind and round.
  std::pair<message_header, std::span<const std::byte>> receive(message_kind kind, std::uint64_t round) {
    const auto message = receive();
    if (message.first.kind != kind || message.first.round != round) {
      throw std::runtime_error("a message of kind " +
                               std::to_string(static_cast<std::uint32_t>(message.first.kind)) +
                               " and round " + std::to_string(message.first.round) + " from " + peer_ +
                               ", where kind " + std::to_string(static_cast<std::uint32_t>(kind)) +
                               " and round " + std::to_string(round) + " is due");
    }
    return message;
  }

 private:
  static constexpr std::uint64_t most_bytes = 1U << 24U;

  void wait_for(short events) const {
    pollfd wanted{descriptor_, events, 0};
    const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(deadline).count();
    const int ready = poll(&wanted, 1, static_cast<int>(milliseconds));
    if (ready < 0 && errno != EINTR) throw std::runtime_error("poll failed on the socket of " + peer_);
    if (ready == 0) throw std::runtime_error("nothing from " + peer_ + " within the deadline");
  }

  void write_all(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      wait_for(POLLOUT);
      const ssize_t sent = ::send(descriptor_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) throw peer_lost("lost " + peer_);
      if (sent < 0 && errno != EAGAIN && errno != EINTR) throw std::runtime_error("cannot send to " + peer_);
      if (sent > 0) bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }

  void read_all(std::span<std::byte> bytes) {
    while (!bytes.empty()) {
      wait_for(POLLIN);
      const ssize_t got = recv(descriptor_, bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno == ECONNRESET)) throw peer_lost("lost " + peer_);
      if (got < 0 && errno != EAGAIN && errno != EINTR)
        throw std::runtime_error("cannot receive from " + peer_);
      if (got > 0) bytes = bytes.subspan(static_cast<std::size_t>(got));
    }
  }

  int descriptor_;
  std::string peer_;
  std::vector<std::byte> body_;
};

}  // namespace soak
