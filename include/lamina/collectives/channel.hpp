// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "lamina/detail/raise.hpp"

/// \file
/// What carries messages between ranks: the interface that a transport implements, as mpi_channel.hpp does. Read it after sum.hpp.
namespace lamina::inline LAMINA_ABI::collectives {

/// Thrown where a message of another rank is not the one that is due, does not come, or cannot be sent.
class LAMINA_VISIBLE channel_error : public std::runtime_error {
 public:
  /// Of the other rank, and a sentence.
  channel_error(std::size_t rank, const std::string& what) : std::runtime_error(what), rank_(rank) {}
  [[nodiscard]] std::size_t rank() const noexcept { return rank_; }

 private:
  std::size_t rank_;
};

/// A message that is under way: a number below channel::most_tickets, free for another once it is done.
using ticket = std::uint32_t;

/// A message that is done: sent, so that its memory may be written again, or received.
struct completion {
  ticket which = 0;
  /// That were sent, or have arrived: fewer than were expected are no error of the channel.
  std::size_t bytes = 0;
  bool is_truncated = false;  ///< more have come than were expected; what fits has been written
};

/// A message in two parts, of which either may be empty: a header and the elements, which lie elsewhere.
template <class Byte>
struct two_parts {
  std::span<Byte> header;
  std::span<Byte> elements;
  [[nodiscard]] std::size_t size() const noexcept { return header.size() + elements.size(); }
};

/// Messages between ranks, of which none blocks. Those of one sender and receiver arrive in the order in which they were sent. For one
/// user and one thread at a time.
class channel {
 public:
  /// Messages under way at a time, at most; more are a std::logic_error.
  static constexpr std::size_t most_tickets = 4096;

  channel() = default;
  channel(const channel&) = delete;
  channel& operator=(const channel&) = delete;
  virtual ~channel() = default;

  [[nodiscard]] virtual std::size_t rank() const = 0;
  [[nodiscard]] virtual std::size_t ranks() const = 0;
  /// What to call a rank in a sentence: "rank 2".
  [[nodiscard]] virtual std::string name_of(std::size_t rank) const { return "rank " + std::to_string(rank); }

  /// The memory must live, and not be written, until the ticket is done.
  virtual ticket send(std::size_t to, two_parts<const std::byte> message) = 0;
  /// The memory must live, and not be read, until the ticket is done.
  virtual ticket receive(std::size_t from, two_parts<std::byte> message) = 0;
  /// Moves data on. What is done since the last call, valid until the next one. Throws channel_error naming a rank.
  virtual std::span<const completion> progress() = 0;
  /// Ends the channel: nobody waits any more for what is under way. `memory` lives for as long as somebody may write into it or read
  /// from it. From then on progress() gives nothing, and send() and receive() throw std::logic_error.
  virtual void abandon(std::shared_ptr<const void> memory) = 0;

 protected:
  [[noreturn]] static void throw_abandoned() {
    lamina::detail::refuse<std::logic_error>(
        "this channel has ended: who used it before failed, or left messages under way; make a new channel");
  }
};

namespace detail {

/// How long a rank has looked for messages, and seen nothing move. Time in which it did not look is not the silence of others: of what
/// lies between two looks 10 ms count at most.
class patience {
 public:
  /// Throws std::invalid_argument for a timeout that is not above 0.
  explicit patience(std::chrono::milliseconds timeout) : timeout_(timeout) {
    if (timeout.count() <= 0)
      lamina::detail::refuse("a timeout of ", timeout.count(), " ms: it must be above 0");
  }

  /// Something has moved.
  void renew() noexcept {
    silence_ = {};
    looked_at_ = clock::now();
  }
  /// Nothing has. Whether that is so for as long as the timeout.
  [[nodiscard]] bool is_over() noexcept {
    const auto now = clock::now();
    silence_ += std::min<clock::duration>(now - looked_at_, most_between_looks);
    looked_at_ = now;
    // In the timeout's unit: the largest timeout there is has too many nanoseconds for a clock.
    return std::chrono::duration_cast<std::chrono::milliseconds>(silence_) >= timeout_;
  }
  /// The timeout, as in "0.200".
  [[nodiscard]] std::string seconds() const {
    return std::to_string(std::chrono::duration<double>(timeout_).count()).substr(0, 5);
  }

 private:
  using clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds most_between_looks{10};

  std::chrono::milliseconds timeout_;
  clock::duration silence_{};
  clock::time_point looked_at_ = clock::now();
};

}  // namespace detail
}  // namespace lamina::inline LAMINA_ABI::collectives
