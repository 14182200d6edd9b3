// SPDX-License-Identifier: MIT
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <lamina/bounded/packet.hpp>
#include <lamina/bounded/rate.hpp>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "messages/udp/address.hpp"
#include "messages/udp/descriptor.hpp"

namespace lab {

struct udp_socket_options {
  double inject_loss = 0;         ///< share of the packets that are counted as sent, and are not
  std::uint64_t inject_seed = 1;  ///< of which ones
  bool joins_segments = true;     ///< false: each datagram by itself, as where the system cannot segment
  bool takes_joined = true;       ///< the same of what comes
};

struct udp_counters {
  std::uint64_t sent = 0;
  std::uint64_t injected = 0;  ///< lost on purpose
  std::uint64_t unsent = 0;    ///< lost since the system would not send them now
  std::uint64_t overrun = 0;   ///< lost since this end did not take them in time

  udp_counters& operator+=(const udp_counters& more) {
    sent += more.sent;
    injected += more.injected;
    unsent += more.unsent;
    overrun += more.overrun;
    return *this;
  }
};

/// One path of packets: a socket of one local address. What is sent is not copied: it goes from where the elements lie, 64 messages
/// a call, each of up to 16 datagrams of one size, tag and receiver that the kernel cuts apart (UDP_SEGMENT). Where that
/// fails once, each datagram goes by itself from then on. What comes is taken joined as well, where the kernel has it so (UDP_GRO).
class udp_socket {
 public:
  /// The port is the system's choice. Throws link_error.
  udp_socket(const endpoint& local, const udp_socket_options& options);
  udp_socket(udp_socket&& other) noexcept;
  ~udp_socket();

  int descriptor_number() const { return socket_.get(); }
  const endpoint& local() const { return local_; }
  bool joins_segments() const { return joins_segments_; }
  const udp_counters& counters() const { return counters_; }

  /// One more packet for flush(); its data stay as they are until it has gone, or was dropped.
  void put(const endpoint& to, const lamina::bounded::outgoing_packet& packet, std::uint8_t type_of_service);
  /// Whether there is room for another before the next flush().
  bool has_room() const { return queue_.size() < most_queued; }
  bool is_empty() const { return queue_.empty(); }
  /// Forgets what waits for this receiver.
  void drop(const endpoint& to);
  /// Sends what was put; false: the system takes no more for now. Throws link_error, naming the receiver and the size, for packets that
  /// do not fit the path.
  bool flush();

  /// Hands about `most` datagrams to `consume(from, bytes, arrived_at)`, which are gone when it returns; the number of them. They arrived
  /// when the system got them: a thread that gets no core must not look like a queue in the network.
  template <class Consume>
  std::size_t receive(std::size_t most, Consume&& consume) {
    std::size_t taken = 0;
    while (taken < most) {
      const std::size_t count = fill();
      for (std::size_t i = 0; i < count; ++i) {
        const endpoint from = slots_[i].from.to_endpoint();
        for (auto rest = received(i); !rest.empty(); ++taken) {
          const std::size_t bytes = std::min(slots_[i].datagram_bytes, rest.size());
          consume(from, rest.first(bytes), slots_[i].arrived_at);
          rest = rest.subspan(bytes);
        }
      }
      if (count < slots_.size()) break;
    }
    return taken;
  }

  static constexpr std::size_t messages_a_call = 64;
  /// Fewer, as each holds 16 datagrams where they come from such a socket.
  static constexpr std::size_t messages_a_read = 32;
  static constexpr std::size_t most_segments = 16;

 private:
  static constexpr std::size_t most_queued = 512;
  static constexpr std::size_t most_message_bytes = std::size_t{1} << 16U;  // that the kernel hands over
  // No power of two, or the beginnings of all would lie in the same lines of the cache.
  static constexpr std::size_t slot_bytes = most_message_bytes + 4160;

  struct queued {
    lamina::bounded::outgoing_packet packet;
    endpoint to;
    std::uint8_t type_of_service = 0;
    bool is_done = false;
  };
  // What one message holds: indices in the queue.
  struct joined {
    std::array<std::uint16_t, most_segments> packets{};
    std::size_t count = 0;
  };
  struct slot {
    socket_address from;
    std::size_t bytes = 0;
    std::size_t datagram_bytes = 0;  // of each but the last
    lamina::bounded::instant arrived_at{};
  };
  class call;

  std::size_t join(std::span<joined> messages) const;
  bool take_error(const joined& refused, int error);
  void finish(const joined& sent, std::uint64_t udp_counters::*count);
  [[noreturn]] void refuse_size(const queued& packet) const;
  std::size_t fill();
  std::span<const std::byte> received(std::size_t index) const {
    return {buffer_.get() + index * slot_bytes, slots_[index].bytes};
  }

  descriptor socket_;
  endpoint local_;
  bool joins_segments_;
  double inject_loss_;
  std::mt19937_64 random_;
  udp_counters counters_;
  std::vector<queued> queue_;
  std::unique_ptr<call> call_;
  std::unique_ptr<std::byte[]> buffer_;
  std::array<slot, messages_a_read> slots_;
};

}  // namespace lab
