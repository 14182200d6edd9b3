// SPDX-License-Identifier: MIT
#include <cstdio>
#include <lamina/udp/udp.hpp>

int main() {
  namespace udp = lamina::udp;
  udp::packet_socket from(udp::parse_addresses("127.0.0.1:0").control);
  udp::packet_socket to(udp::parse_addresses("127.0.0.1:0").control);
  const std::vector<std::byte> data(1224);
  from.put(to.local(), {.data = {data}}, 0);
  if (!from.flush()) return 1;
  std::size_t bytes = 0;
  while (bytes == 0) {
    to.receive(1, [&](const auto&, std::span<const std::byte> datagram, auto) { bytes = datagram.size(); });
  }
  std::printf("%zu\n", bytes);  // with the header of a packet
}
