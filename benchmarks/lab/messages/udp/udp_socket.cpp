// SPDX-License-Identifier: MIT
#include "messages/udp/udp_socket.hpp"

#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/udp.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <optional>
#include <string>

#include "messages/udp/clock.hpp"

namespace lab {
namespace {

using namespace std::chrono_literals;

constexpr int buffer_bytes = 4 << 20;
// What one call may hand the kernel in one message: the most that UDP carries.
constexpr std::size_t most_joined_bytes = 65'000;
// Of what is sent, size and class; of what comes, drops and the time of arrival.
constexpr std::size_t control_bytes = 2 * CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(timespec));

descriptor datagram_socket(const endpoint& of) {
  descriptor made(::socket(of.is_v6 != 0 ? AF_INET6 : AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made.is_open()) throw_system_error("a UDP socket");
  return made;
}

void set(int socket, int level, int option, int value, const char* name) {
  if (setsockopt(socket, level, option, &value, sizeof value) != 0) throw_system_error(name);
}

// More than the system's limit where this process may.
void set_buffer(int socket, int forced, int limited, const char* name) {
  if (setsockopt(socket, SOL_SOCKET, forced, &buffer_bytes, sizeof buffer_bytes) == 0) return;
  set(socket, SOL_SOCKET, limited, buffer_bytes, name);
}

template <class Value>
cmsghdr* append(msghdr& message, cmsghdr* at, int level, int type, Value value) {
  at->cmsg_level = level;
  at->cmsg_type = type;
  at->cmsg_len = CMSG_LEN(sizeof value);
  std::memcpy(CMSG_DATA(at), &value, sizeof value);
  message.msg_controllen += CMSG_SPACE(sizeof value);
  return reinterpret_cast<cmsghdr*>(reinterpret_cast<std::byte*>(at) + CMSG_SPACE(sizeof value));
}

// Not below 0 nor beyond a second, where the clock was set meanwhile.
std::chrono::nanoseconds between(const timespec& begin, const timespec& end) {
  const std::chrono::nanoseconds took =
      std::chrono::seconds(end.tv_sec - begin.tv_sec) + std::chrono::nanoseconds(end.tv_nsec - begin.tv_nsec);
  return std::clamp<std::chrono::nanoseconds>(took, 0ns, 1s);
}

// Of the path, not of this process: as if the packet were lost.
bool is_transient(int error) {
  return error == ENOBUFS || error == ENOMEM || error == ECONNREFUSED || error == EHOSTUNREACH ||
         error == ENETUNREACH || error == ENETDOWN || error == EHOSTDOWN || error == EPERM;
}

}  // namespace

// The memory of sendmmsg and recvmmsg.
class udp_socket::call {
 public:
  void send_to(std::size_t index, const joined& packets, const std::vector<queued>& queue) {
    const queued& first = queue[packets.packets[0]];
    addresses_[index] = socket_address(first.to);
    iovec* const begin = &pieces_[index * pieces_a_message];
    iovec* end = begin;
    for (std::size_t i = 0; i < packets.count; ++i) {
      const lamina::bounded::outgoing_packet& packet = queue[packets.packets[i]].packet;
      *end++ = piece(packet.header);
      for (const auto data : packet.data) {
        if (!data.empty()) *end++ = piece(data);
      }
    }
    msghdr& message = messages_[index].msg_hdr;
    message = {};
    message.msg_name = addresses_[index].get();
    message.msg_namelen = addresses_[index].length;
    message.msg_iov = begin;
    message.msg_iovlen = static_cast<std::size_t>(end - begin);
    message.msg_control = controls_[index].data();
    const bool is_v6 = first.to.is_v6 != 0;
    auto* at = reinterpret_cast<cmsghdr*>(controls_[index].data());
    at = append(message, at, is_v6 ? IPPROTO_IPV6 : IPPROTO_IP, is_v6 ? IPV6_TCLASS : IP_TOS,
                static_cast<int>(first.type_of_service));
    if (packets.count > 1) {
      append(message, at, SOL_UDP, UDP_SEGMENT, static_cast<std::uint16_t>(first.packet.size_bytes()));
    }
  }

  void receive_into(std::size_t index, std::byte* buffer, std::size_t bytes) {
    pieces_[index] = {buffer, bytes};
    msghdr& message = messages_[index].msg_hdr;
    message = {};
    message.msg_name = addresses_[index].get();
    message.msg_namelen = sizeof(sockaddr_storage);
    message.msg_iov = &pieces_[index];
    message.msg_iovlen = 1;
    message.msg_control = controls_[index].data();
    message.msg_controllen = control_bytes;
  }

  mmsghdr* begin(std::size_t index) { return &messages_[index]; }
  const socket_address& address(std::size_t index) const { return addresses_[index]; }

  struct said {
    std::optional<std::uint32_t> overrun;  // how many the system has dropped before this one
    std::optional<timespec> arrived_at;
    std::optional<int> datagram_bytes;  // of several in one message
  };
  /// What the system says of a datagram.
  said read_control(std::size_t index) {
    said all;
    msghdr& message = messages_[index].msg_hdr;
    for (cmsghdr* at = CMSG_FIRSTHDR(&message); at != nullptr; at = CMSG_NXTHDR(&message, at)) {
      if (at->cmsg_level == SOL_UDP && at->cmsg_type == UDP_GRO)
        std::memcpy(&all.datagram_bytes.emplace(), CMSG_DATA(at), sizeof(int));
      if (at->cmsg_level != SOL_SOCKET) continue;
      if (at->cmsg_type == SO_RXQ_OVFL)
        std::memcpy(&all.overrun.emplace(), CMSG_DATA(at), sizeof(std::uint32_t));
      if (at->cmsg_type == SCM_TIMESTAMPNS)
        std::memcpy(&all.arrived_at.emplace(), CMSG_DATA(at), sizeof(timespec));
    }
    return all;
  }

 private:
  static constexpr std::size_t pieces_a_message = 3 * most_segments;

  // sendmsg does not write to it.
  static iovec piece(std::span<const std::byte> bytes) {
    return {const_cast<std::byte*>(bytes.data()), bytes.size()};
  }

  std::array<mmsghdr, messages_a_call> messages_{};
  std::array<socket_address, messages_a_call> addresses_;
  std::array<iovec, messages_a_call * pieces_a_message> pieces_{};
  struct alignas(cmsghdr) control : std::array<std::byte, control_bytes> {};
  std::array<control, messages_a_call> controls_{};
};

udp_socket::~udp_socket() = default;
udp_socket::udp_socket(udp_socket&&) noexcept = default;

udp_socket::udp_socket(const endpoint& local, const udp_socket_options& options)
    : socket_(datagram_socket(local)),
      joins_segments_(options.joins_segments),
      inject_loss_(options.inject_loss),
      random_(options.inject_seed),
      call_(std::make_unique<call>()),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(messages_a_read * slot_bytes)) {
  const bool is_v6 = local.is_v6 != 0;
  const int number = socket_.get();
  set_buffer(number, SO_RCVBUFFORCE, SO_RCVBUF, "SO_RCVBUF");
  set_buffer(number, SO_SNDBUFFORCE, SO_SNDBUF, "SO_SNDBUF");
  set(number, SOL_SOCKET, SO_RXQ_OVFL, 1, "SO_RXQ_OVFL");
  set(number, SOL_SOCKET, SO_TIMESTAMPNS, 1, "SO_TIMESTAMPNS");
  if (options.takes_joined) {
    const int yes = 1;  // where the system does not know it, datagrams come one by one
    setsockopt(number, SOL_UDP, UDP_GRO, &yes, sizeof yes);
  }
  if (is_v6) {
    set(number, IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO, "IPV6_MTU_DISCOVER");
  } else {
    set(number, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO, "IP_MTU_DISCOVER");
  }
  socket_address address(local);
  if (bind(number, address.get(), address.length) != 0)
    throw_system_error("UDP on the address " + text_of(local));
  address.length = sizeof(sockaddr_storage);
  if (getsockname(number, address.get(), &address.length) != 0) throw_system_error("getsockname");
  local_ = address.to_endpoint();
  queue_.reserve(most_queued);
}

void udp_socket::put(const endpoint& to, const lamina::bounded::outgoing_packet& packet,
                     std::uint8_t type_of_service) {
  ++counters_.sent;
  // The top 53 bits, as a number from 0 to below 1.
  if (inject_loss_ > 0 && static_cast<double>(random_() >> 11U) * 0x1p-53 < inject_loss_) {
    ++counters_.injected;
    return;
  }
  queue_.push_back({packet, to, type_of_service});
}

void udp_socket::drop(const endpoint& to) {
  std::erase_if(queue_, [&](const queued& each) { return each.to == to; });
}

// Packets of one receiver, size and tag share a message, in whatever order they were put: order means nothing to who takes them.
std::size_t udp_socket::join(std::span<joined> messages) const {
  std::size_t count = 0;
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    const queued& packet = queue_[i];
    const std::size_t bytes = packet.packet.size_bytes();
    const std::size_t room = joins_segments_ ? std::min(most_segments, most_joined_bytes / bytes) : 1;
    const auto fits = [&](const joined& message) {
      const queued& first = queue_[message.packets[0]];
      return message.count < room && first.to == packet.to && first.packet.size_bytes() == bytes &&
             first.type_of_service == packet.type_of_service;
    };
    const auto open = messages.first(count);
    auto found = std::ranges::find_if(open, fits);
    if (found == open.end()) {
      if (count == messages.size()) break;
      found = messages.begin() + static_cast<std::ptrdiff_t>(count++);
      found->count = 0;
    }
    found->packets[found->count++] = static_cast<std::uint16_t>(i);
  }
  return count;
}

bool udp_socket::flush() {
  std::array<joined, messages_a_call> messages;
  while (!queue_.empty()) {
    const std::size_t count = join(messages);
    for (std::size_t i = 0; i < count; ++i) call_->send_to(i, messages[i], queue_);
    bool is_full = false;
    for (std::size_t done = 0; done < count && !is_full;) {
      const int sent = sendmmsg(socket_.get(), call_->begin(done), static_cast<unsigned>(count - done),
                                MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent > 0) {
        for (int i = 0; i < sent; ++i) finish(messages[done++], nullptr);
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        is_full = true;
      } else if (errno != EINTR && take_error(messages[done], errno)) {
        break;  // what is left is joined anew
      } else if (errno != EINTR) {
        finish(messages[done++], &udp_counters::unsent);
      }
    }
    std::erase_if(queue_, [](const queued& each) { return each.is_done; });
    if (is_full) return false;
  }
  return true;
}

// Whether the message is to be tried again, in another way.
bool udp_socket::take_error(const joined& refused, int error) {
  const bool is_joined = refused.count > 1;
  if (is_joined && (error == EIO || error == EINVAL || error == EOPNOTSUPP || error == EMSGSIZE)) {
    // The device or the system cannot; or one of them is too long, which is seen when it goes by itself.
    joins_segments_ = false;
    return true;
  }
  const queued& first = queue_[refused.packets[0]];
  if (error == EMSGSIZE) refuse_size(first);
  if (!is_transient(error)) throw_system_error("UDP to " + text_of(first.to), error);
  return false;
}

void udp_socket::finish(const joined& sent, std::uint64_t udp_counters::*count) {
  for (std::size_t i = 0; i < sent.count; ++i) queue_[sent.packets[i]].is_done = true;
  if (count != nullptr) counters_.*count += sent.count;
}

void udp_socket::refuse_size(const queued& packet) const {
  const bool is_v6 = packet.to.is_v6 != 0;
  const std::size_t headers = is_v6 ? 48 : 28;
  std::string known;
  // A connected socket knows what the path takes.
  const descriptor probe(::socket(is_v6 ? AF_INET6 : AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const socket_address to(packet.to);
  int mtu = 0;
  socklen_t length = sizeof mtu;
  if (probe.is_open() && connect(probe.get(), to.get(), to.length) == 0 &&
      getsockopt(probe.get(), is_v6 ? IPPROTO_IPV6 : IPPROTO_IP, is_v6 ? IPV6_MTU : IP_MTU, &mtu, &length) ==
          0) {
    known = " of " + std::to_string(mtu) + " bytes";
  }
  throw link_error("a packet of " + std::to_string(packet.packet.size_bytes() + headers) +
                   " bytes is beyond the MTU" + known + " of the path to " + text_of(packet.to) +
                   ": give --mtu so much or less");
}

std::size_t udp_socket::fill() {
  for (std::size_t i = 0; i < slots_.size(); ++i)
    call_->receive_into(i, buffer_.get() + i * slot_bytes, most_message_bytes);
  const int count =
      recvmmsg(socket_.get(), call_->begin(0), static_cast<unsigned>(slots_.size()), MSG_DONTWAIT, nullptr);
  if (count < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || is_transient(errno)) return 0;
    throw_system_error("UDP on the address " + text_of(local_));
  }
  // In this order. If something comes between the two, these datagrams seem to have come late; the other way round they would seem to
  // have come before they were sent, and all the others, for 10 s, to have waited in a queue.
  timespec system_now{};
  clock_gettime(CLOCK_REALTIME, &system_now);
  const lamina::bounded::instant now = clock_now();
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    const call::said said = call_->read_control(i);
    const std::size_t bytes = call_->begin(i)->msg_len;
    slots_[i] = {
        .from = call_->address(i),
        .bytes = bytes,
        .datagram_bytes = said.datagram_bytes ? static_cast<std::size_t>(*said.datagram_bytes) : bytes,
        .arrived_at = now - (said.arrived_at ? between(*said.arrived_at, system_now) : 0ns)};
    if (said.overrun)
      counters_.overrun += *said.overrun - static_cast<std::uint32_t>(counters_.overrun);  // it wraps
  }
  return static_cast<std::size_t>(count);
}

}  // namespace lab
