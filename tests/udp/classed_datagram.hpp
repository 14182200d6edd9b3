// SPDX-License-Identifier: MIT
#pragma once

#include <netinet/in.h>
#include <netinet/ip.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "lamina/udp/socket.hpp"

namespace lamina_test {

struct classed_datagram {
  std::vector<std::byte> bytes;
  std::uint8_t type_of_service = 0;
};

/// The next datagram of a socket with IP_RECVTOS; none if nothing comes in time.
inline std::optional<classed_datagram> next_datagram(const lamina::udp::packet_socket& at, int timeout_ms) {
  std::vector<std::byte> bytes(65536);
  alignas(cmsghdr) std::array<std::byte, 256> control{};
  iovec piece{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  pollfd ready{at.descriptor_number(), POLLIN, 0};
  if (poll(&ready, 1, timeout_ms) != 1) return std::nullopt;
  const ssize_t length = recvmsg(at.descriptor_number(), &message, 0);
  if (length < 0) return std::nullopt;
  bytes.resize(static_cast<std::size_t>(length));
  classed_datagram come{std::move(bytes), 0};
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr; each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level == IPPROTO_IP && each->cmsg_type == IP_TOS)
      std::memcpy(&come.type_of_service, CMSG_DATA(each), 1);
  }
  return come;
}

}  // namespace lamina_test
