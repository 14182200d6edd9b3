// SPDX-License-Identifier: MIT
// Whether this machine carries an emulated link's rate: datagrams of whole packets, paced at a rate, and how many of them come.
//     paced receive PORT             prints how many have come when half a second has brought none
//     paced send ADDRESS PORT RATE SECONDS     RATE in bits a second on the wire; prints the seconds that it took
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t datagram_bytes = 1472;
constexpr std::size_t packet_bytes = datagram_bytes + 42;
constexpr std::size_t packets_a_call = 16;
constexpr int socket_buffer_bytes = 4 << 20;

[[noreturn]] void fail(const char* call) {
  throw std::system_error(errno, std::generic_category(), call);
}

class udp {
 public:
  udp() : socket_(::socket(AF_INET, SOCK_DGRAM, 0)) {
    if (socket_ < 0) fail("socket");
    for (const int option : {SO_RCVBUFFORCE, SO_SNDBUFFORCE})
      ::setsockopt(socket_, SOL_SOCKET, option, &socket_buffer_bytes, sizeof socket_buffer_bytes);
  }
  ~udp() { ::close(socket_); }
  udp(const udp&) = delete;
  udp& operator=(const udp&) = delete;
  int get() const { return socket_; }

 private:
  int socket_;
};

double number(const std::string& text) {
  std::size_t end = 0;
  double value = 0;
  try {
    value = std::stod(text, &end);
  } catch (const std::logic_error&) {
  }
  if (end == 0 || end != text.size() || !(value > 0))
    throw std::invalid_argument(text + " is no number above 0");
  return value;
}

sockaddr_in address_of(const char* address, const char* port) {
  const double at_port = number(port);
  if (at_port > 65535) throw std::invalid_argument(std::string(port) + " is no port");
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<std::uint16_t>(at_port));
  if (::inet_pton(AF_INET, address, &at.sin_addr) != 1)
    throw std::invalid_argument(std::string(address) + " is no address");
  return at;
}

std::uint64_t receive(const char* port) {
  const udp socket;
  const sockaddr_in at = address_of("0.0.0.0", port);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) fail("bind");
  std::printf("ready\n");
  std::fflush(stdout);
  std::vector<std::array<char, datagram_bytes>> room(64);
  std::vector<iovec> pieces(room.size());
  std::vector<mmsghdr> messages(room.size());
  for (std::size_t i = 0; i < room.size(); ++i) {
    pieces[i] = {room[i].data(), datagram_bytes};
    messages[i].msg_hdr.msg_iov = &pieces[i];
    messages[i].msg_hdr.msg_iovlen = 1;
  }
  std::uint64_t count = 0;
  for (timeval patience{10, 0};; patience = {0, 500'000}) {
    ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const int came = ::recvmmsg(socket.get(), messages.data(), static_cast<unsigned>(messages.size()),
                                MSG_WAITFORONE, nullptr);
    if (came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return count;
    if (came < 0) fail("recvmmsg");
    count += static_cast<std::uint64_t>(came);
  }
}

// Sixteen packets as one: what the kernel cuts costs it a sixteenth of the calls.
void send_together(const udp& socket, const std::vector<char>& bytes) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(std::uint16_t))> control{};
  iovec piece{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_UDP;
  head->cmsg_type = UDP_SEGMENT;
  head->cmsg_len = CMSG_LEN(sizeof(std::uint16_t));
  const auto segment = static_cast<std::uint16_t>(datagram_bytes);
  std::memcpy(CMSG_DATA(head), &segment, sizeof segment);
  if (::sendmsg(socket.get(), &message, 0) < 0 && errno != ENOBUFS) fail("sendmsg");
}

double send(const sockaddr_in& to, double rate_bits, double seconds) {
  const udp socket;
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) fail("connect");
  const std::vector<char> bytes(packets_a_call * datagram_bytes);
  const std::chrono::duration<double> period(8.0 * packets_a_call * packet_bytes / rate_bits);
  const auto calls = static_cast<std::uint64_t>(seconds / period.count());
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint64_t call = 0; call < calls; ++call) {
    send_together(socket, bytes);
    std::this_thread::sleep_until(begin + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                              period * static_cast<double>(call + 1)));
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> words(argv, argv + argc);
    if (words.size() == 3 && words[1] == "receive") {
      std::printf("%llu\n", static_cast<unsigned long long>(receive(argv[2])));
    } else if (words.size() == 6 && words[1] == "send") {
      std::printf("%.6f\n", send(address_of(argv[2], argv[3]), number(words[4]), number(words[5])));
    } else {
      std::fprintf(stderr, "paced receive PORT | paced send ADDRESS PORT RATE SECONDS\n");
      return EXIT_FAILURE;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "paced: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
