// SPDX-License-Identifier: MIT
#pragma once

/// One path of packets: a UDP socket that sends and takes many datagrams a call. Read after address.hpp, before control.hpp.

#include <netinet/ip.h>
#include <netinet/udp.h>
#include <sys/uio.h>

#include <ctime>
#include <random>

#include "lamina/udp/address.hpp"

namespace lamina::inline LAMINA_ABI::udp {

struct socket_options {
  double inject_loss = 0;         ///< share of the packets that are counted as sent, and are not; in [0, 1]
  std::uint64_t inject_seed = 1;  ///< of which ones
};

struct socket_counters {
  std::uint64_t sent = 0;
  std::uint64_t injected = 0;  ///< lost on purpose
  std::uint64_t unsent = 0;    ///< lost since the system would not send them now
  std::uint64_t overrun = 0;   ///< lost since this end did not take them in time
};

namespace detail {

inline void set_option(int socket, int level, int option, int value, const char* name) {
  if (::setsockopt(socket, level, option, &value, sizeof value) != 0) throw_system_error(name);
}

/// The memory of sendmmsg and recvmmsg.
class message_batch {
 public:
  static constexpr std::size_t messages = 64;
  static constexpr std::size_t most_segments = 16;  ///< datagrams in one message

  /// A message to `to`, of no packet so far.
  void begin(std::size_t index, const endpoint& to, std::uint8_t type_of_service) {
    addresses_[index] = socket_address(to);
    msghdr& message = prepare(index, 0);
    message.msg_namelen = addresses_[index].length;
    message.msg_controllen = 0;
    const bool is_v6 = to.is_v6 != 0;
    append(index, is_v6 ? IPPROTO_IPV6 : IPPROTO_IP, is_v6 ? IPV6_TCLASS : IP_TOS, int{type_of_service});
  }
  /// One more packet of it. With the second it says of how many bytes each is.
  void add(std::size_t index, const bounded::outgoing_packet& packet, bool is_second) {
    const auto put = [&](std::span<const std::byte> bytes) {
      // sendmsg does not write to it.
      pieces_[index * pieces_a_message + messages_[index].msg_hdr.msg_iovlen++] = {
          const_cast<std::byte*>(bytes.data()), bytes.size()};
    };
    put(packet.header);
    for (const auto data : packet.data)
      if (!data.empty()) put(data);
    if (is_second) append(index, SOL_UDP, UDP_SEGMENT, static_cast<std::uint16_t>(packet.size_bytes()));
  }
  void receive_into(std::size_t index, std::byte* buffer, std::size_t bytes) {
    pieces_[index * pieces_a_message] = {buffer, bytes};
    prepare(index, 1);
  }
  mmsghdr* at(std::size_t index) { return &messages_[index]; }
  [[nodiscard]] endpoint from(std::size_t index) const { return addresses_[index].to_endpoint(); }
  /// What the system says of a message that came, if it says something of this level and type; otherwise `otherwise`.
  template <class Value>
  [[nodiscard]] Value note(std::size_t index, int level, int type, Value otherwise) {
    msghdr& message = messages_[index].msg_hdr;
    for (cmsghdr* at = CMSG_FIRSTHDR(&message); at != nullptr; at = CMSG_NXTHDR(&message, at)) {
      if (at->cmsg_level == level && at->cmsg_type == type)
        std::memcpy(&otherwise, CMSG_DATA(at), sizeof otherwise);
    }
    return otherwise;
  }

 private:
  static constexpr std::size_t pieces_a_message = 3 * most_segments;
  // Of what is sent, class and size; of what comes, drops, size and the time of arrival.
  static constexpr std::size_t control_bytes = 2 * CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(timespec));

  msghdr& prepare(std::size_t index, std::size_t count) {
    msghdr& message = messages_[index].msg_hdr;
    message = {};
    message.msg_name = &addresses_[index].is.any;
    message.msg_namelen = sizeof(sockaddr_in6);
    message.msg_iov = &pieces_[index * pieces_a_message];
    message.msg_iovlen = count;
    message.msg_control = controls_[index].data();
    message.msg_controllen = control_bytes;
    return message;
  }
  template <class Value>
  void append(std::size_t index, int level, int type, Value value) {
    msghdr& message = messages_[index].msg_hdr;
    auto* const at = reinterpret_cast<cmsghdr*>(controls_[index].data() + message.msg_controllen);
    at->cmsg_level = level;
    at->cmsg_type = type;
    at->cmsg_len = CMSG_LEN(sizeof value);
    std::memcpy(CMSG_DATA(at), &value, sizeof value);
    message.msg_controllen += CMSG_SPACE(sizeof value);
  }

  struct alignas(cmsghdr) control : std::array<std::byte, control_bytes> {};
  std::array<mmsghdr, messages> messages_{};
  std::array<socket_address, messages> addresses_;
  std::array<iovec, messages * pieces_a_message> pieces_{};
  std::array<control, messages> controls_{};
};

}  // namespace detail

/// A UDP socket on one local address. What is sent is not copied: it goes from where the elements lie, 64 messages a call, each of up to
/// 16 datagrams of one size, class and receiver that the kernel cuts apart (UDP_SEGMENT). Where that fails once, each datagram goes by
/// itself from then on. What comes is taken joined as well, where the kernel can (UDP_GRO).
class packet_socket {
 public:
  /// Throws error, naming the address; std::invalid_argument for a share outside [0, 1].
  explicit packet_socket(const endpoint& local, const socket_options& options = {})
      : socket_(
            ::socket(local.is_v6 != 0 ? AF_INET6 : AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)),
        inject_loss_(options.inject_loss),
        random_(options.inject_seed),
        batch_(std::make_unique<detail::message_batch>()),
        buffer_(std::make_unique_for_overwrite<std::byte[]>(messages_a_read * slot_bytes)) {
    if (!lamina::detail::is_finite(inject_loss_) || inject_loss_ < 0 || inject_loss_ > 1)
      lamina::detail::refuse("the share of packets to lose is not in [0, 1]");
    if (!socket_.is_open()) detail::throw_system_error("a UDP socket");
    const int number = socket_.get();
    set_buffer(number, SO_RCVBUFFORCE, SO_RCVBUF, "SO_RCVBUF");
    set_buffer(number, SO_SNDBUFFORCE, SO_SNDBUF, "SO_SNDBUF");
    detail::set_option(number, SOL_SOCKET, SO_RXQ_OVFL, 1, "SO_RXQ_OVFL");
    detail::set_option(number, SOL_SOCKET, SO_TIMESTAMPNS, 1, "SO_TIMESTAMPNS");
    const int yes = 1;  // where the system does not know it, datagrams come one by one
    ::setsockopt(number, SOL_UDP, UDP_GRO, &yes, sizeof yes);
    if (local.is_v6 != 0) {
      detail::set_option(number, IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO, "IPV6_MTU_DISCOVER");
    } else {
      detail::set_option(number, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO, "IP_MTU_DISCOVER");
    }
    local_ = detail::bind_to(number, local, "UDP");
    queue_.reserve(most_queued);
  }

  [[nodiscard]] int descriptor_number() const noexcept { return socket_.get(); }
  [[nodiscard]] const endpoint& local() const noexcept { return local_; }
  [[nodiscard]] bool joins_segments() const noexcept { return joins_segments_; }
  [[nodiscard]] const socket_counters& counters() const noexcept { return counters_; }

  /// One more packet for flush(); its data stay as they are until it has gone, or was dropped.
  void put(const endpoint& to, const bounded::outgoing_packet& packet, std::uint8_t type_of_service) {
    ++counters_.sent;
    // The top 53 bits, as a number from 0 to below 1.
    if (inject_loss_ > 0 && static_cast<double>(random_() >> 11U) * 0x1p-53 < inject_loss_) {
      ++counters_.injected;
    } else {
      queue_.push_back({packet, to, type_of_service});
    }
  }
  /// Whether another packet fits before the next flush().
  [[nodiscard]] bool has_room() const noexcept { return queue_.size() < most_queued; }
  [[nodiscard]] bool is_empty() const noexcept { return queue_.empty(); }
  /// Forgets the packets to this receiver that have not gone.
  void drop(const endpoint& to) {
    std::erase_if(queue_, [&](const queued& each) { return each.to == to; });
  }

  /// Sends what was put; false: the system takes no more for now. Throws error, naming the receiver and the size, for packets that do not
  /// fit the path.
  bool flush() {
    std::array<group, detail::message_batch::messages> groups;
    bool is_full = false;
    while (!queue_.empty() && !is_full) {
      const std::size_t count = join(groups);
      for (std::size_t done = 0; done < count && !is_full;) {
        const int sent = ::sendmmsg(socket_.get(), batch_->at(done), static_cast<unsigned>(count - done),
                                    MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) {
          for (int i = 0; i < sent; ++i) finish(groups[done++]);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
          is_full = true;
        } else if (errno != EINTR && take_error(groups[done], errno)) {
          break;  // what remains is joined anew
        } else if (errno != EINTR) {
          counters_.unsent += groups[done].count;
          finish(groups[done++]);
        }
      }
      std::erase_if(queue_, [](const queued& each) { return each.is_done; });
    }
    return !is_full;
  }

  /// Hands about `most` datagrams to `consume(from, bytes, arrived_at)`, which are gone when it returns; the number of them. The time is
  /// when the system got them: a thread that gets no core must not look like a queue in the network.
  template <class Consume>
  std::size_t receive(std::size_t most, Consume&& consume) {
    std::size_t taken = 0;
    while (taken < most) {
      const std::size_t count = fill();
      // In this order. If something comes between the two, these datagrams seem to have come late; the other way round they would seem
      // to have come before they were sent, and all the others, for 10 s, to have waited in a queue.
      timespec system_now{};
      ::clock_gettime(CLOCK_REALTIME, &system_now);
      const bounded::instant now = detail::clock_now();
      for (std::size_t i = 0; i < count; ++i) {
        std::span<const std::byte> rest(buffer_.get() + i * slot_bytes, batch_->at(i)->msg_len);
        // How many the system has dropped before this one, which wraps.
        const auto known = static_cast<std::uint32_t>(counters_.overrun);
        counters_.overrun += batch_->note(i, SOL_SOCKET, SO_RXQ_OVFL, known) - known;
        const auto arrived_at =
            now - between(batch_->note(i, SOL_SOCKET, SCM_TIMESTAMPNS, system_now), system_now);
        // Of each datagram but the last.
        const int joined_bytes = batch_->note(i, SOL_UDP, UDP_GRO, static_cast<int>(rest.size()));
        for (const endpoint from = batch_->from(i); !rest.empty(); ++taken) {
          const std::size_t bytes = (std::min)(static_cast<std::size_t>(joined_bytes), rest.size());
          consume(from, rest.first(bytes), arrived_at);
          rest = rest.subspan(bytes);
        }
      }
      if (count < messages_a_read) break;
    }
    return taken;
  }

 private:
  static constexpr int system_buffer_bytes = 4 << 20;
  static constexpr std::size_t most_queued = 512;
  // Fewer than are sent a call, as each holds 16 datagrams where they come from such a socket.
  static constexpr std::size_t messages_a_read = 32;
  static constexpr std::size_t most_message_bytes = std::size_t{1} << 16U;  // that the kernel hands over
  static constexpr std::size_t most_joined_bytes = 65'000;                  // that it takes: the most of UDP
  // No power of two, or the beginnings of all would lie in the same lines of the cache.
  static constexpr std::size_t slot_bytes = most_message_bytes + 4160;

  struct queued {
    bounded::outgoing_packet packet;
    endpoint to;
    std::uint8_t type_of_service = 0;
    bool is_done = false;
  };
  // What one message holds: indices in the queue.
  struct group {
    std::array<std::uint16_t, detail::message_batch::most_segments> packets{};
    std::size_t count = 0;
  };

  // More than the system's limit where this process may.
  static void set_buffer(int socket, int forced, int limited, const char* name) {
    const int bytes = system_buffer_bytes;
    if (::setsockopt(socket, SOL_SOCKET, forced, &bytes, sizeof bytes) != 0)
      detail::set_option(socket, SOL_SOCKET, limited, bytes, name);
  }

  // Packets of one receiver, size and class share a message, in whatever order they were put: order means nothing to the receiver.
  std::size_t join(std::span<group> groups) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < queue_.size(); ++i) {
      const queued& packet = queue_[i];
      const std::size_t bytes = packet.packet.size_bytes();
      const std::size_t most =
          joins_segments_ ? (std::min)(detail::message_batch::most_segments, most_joined_bytes / bytes) : 1;
      const auto fits = [&](const group& each) {
        const queued& first = queue_[each.packets[0]];
        return each.count < most && first.to == packet.to && first.packet.size_bytes() == bytes &&
               first.type_of_service == packet.type_of_service;
      };
      const auto open = groups.first(count);
      auto found = std::ranges::find_if(open, fits);
      if (found == open.end()) {
        if (count == groups.size()) break;
        found = groups.begin() + static_cast<std::ptrdiff_t>(count++);
        found->count = 0;
        batch_->begin(count - 1, packet.to, packet.type_of_service);
      }
      batch_->add(static_cast<std::size_t>(found - groups.begin()), packet.packet, found->count == 1);
      found->packets[found->count++] = static_cast<std::uint16_t>(i);
    }
    return count;
  }

  // Whether the message is to be tried again, in another way.
  bool take_error(const group& refused, int number) {
    const bool may_be_joining =
        number == EIO || number == EINVAL || number == EOPNOTSUPP || number == EMSGSIZE;
    if (refused.count > 1 && may_be_joining) {
      // The device or the system cannot; or one of them is too long, which is seen when it goes by itself.
      joins_segments_ = false;
      return true;
    }
    const queued& first = queue_[refused.packets[0]];
    if (number == EMSGSIZE) refuse_size(first);
    if (!is_transient(number)) detail::throw_system_error("UDP to " + text_of(first.to), number);
    return false;
  }
  // Of the path, not of this process: as if the packet were lost.
  static bool is_transient(int number) {
    return number == ENOBUFS || number == ENOMEM || number == ECONNREFUSED || number == EHOSTUNREACH ||
           number == ENETUNREACH || number == ENETDOWN || number == EHOSTDOWN || number == EPERM;
  }
  void finish(const group& sent) {
    for (std::size_t i = 0; i < sent.count; ++i) queue_[sent.packets[i]].is_done = true;
  }

  [[noreturn]] static void refuse_size(const queued& packet) {
    const bool is_v6 = packet.to.is_v6 != 0;
    const std::size_t headers = is_v6 ? 48 : 28;
    std::string known;
    // A connected socket knows what the path takes.
    const detail::descriptor probe(::socket(is_v6 ? AF_INET6 : AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const detail::socket_address to(packet.to);
    int mtu = 0;
    socklen_t length = sizeof mtu;
    if (probe.is_open() && ::connect(probe.get(), &to.is.any, to.length) == 0 &&
        ::getsockopt(probe.get(), is_v6 ? IPPROTO_IPV6 : IPPROTO_IP, is_v6 ? IPV6_MTU : IP_MTU, &mtu,
                     &length) == 0) {
      known = " of " + std::to_string(mtu) + " bytes";
    }
    throw error("a packet of " + std::to_string(packet.packet.size_bytes() + headers) +
                " bytes is beyond the MTU" + known + " of the path to " + text_of(packet.to) +
                ": set an mtu of so much or less");
  }

  // Takes messages into the buffer, each into a slot of its own: how many.
  std::size_t fill() {
    for (std::size_t i = 0; i < messages_a_read; ++i)
      batch_->receive_into(i, buffer_.get() + i * slot_bytes, most_message_bytes);
    const int count = ::recvmmsg(socket_.get(), batch_->at(0), messages_a_read, MSG_DONTWAIT, nullptr);
    if (count >= 0) return static_cast<std::size_t>(count);
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || is_transient(errno)) return 0;
    detail::throw_system_error("UDP on the address " + text_of(local_));
  }
  // Not below 0 nor beyond a second, where the clock was set meanwhile.
  static bounded::instant between(const timespec& begin, const timespec& end) {
    const bounded::instant took =
        std::chrono::seconds(end.tv_sec - begin.tv_sec) + bounded::instant(end.tv_nsec - begin.tv_nsec);
    return std::clamp<bounded::instant>(took, bounded::instant(0), std::chrono::seconds(1));
  }

  detail::descriptor socket_;
  endpoint local_;
  bool joins_segments_ = true;
  double inject_loss_;
  std::mt19937_64 random_;
  socket_counters counters_;
  std::vector<queued> queue_;
  std::unique_ptr<detail::message_batch> batch_;
  std::unique_ptr<std::byte[]> buffer_;
};

}  // namespace lamina::inline LAMINA_ABI::udp
