// SPDX-License-Identifier: MIT
#include "messages/udp/control_channel.hpp"

#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

namespace lab {
namespace {

namespace bounded = lamina::bounded;
using bounded::control_header_bytes;

constexpr std::size_t growth_bytes = std::size_t{16} << 20;
constexpr std::size_t most_bytes_a_read = std::size_t{4} << 20;
constexpr int class_selector_5 = 0xa0;

// TCP_RTO_MIN_US of Linux, which older headers do not name.
constexpr int least_timeout_us = 45;

}  // namespace

control_channel::control_channel(descriptor connection, std::uint64_t secret, const channel_limits& limits)
    : connection_(std::move(connection)), limits_(limits), check_(secret), incoming_(control_header_bytes) {}

void control_channel::put(std::span<const std::byte> message) {
  piece& last = unsent_.emplace_back();
  last.own.assign(message.begin(), message.end());
  last.rest = {last.own};
}

void control_channel::put_message(message_kind kind, payload what) {
  const std::size_t bytes = sizeof kind + what.size_bytes();
  if (bytes > std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument("a message of " + std::to_string(bytes) + " bytes: at most 4 GiB");
  }
  bounded::control_header header{.body_bytes = static_cast<std::uint32_t>(bytes),
                                 .type = bounded::control_type::message};
  piece& last = unsent_.emplace_back();
  last.own.resize(message_begin);
  last.what = std::move(what);
  last.ends_message = true;
  std::memcpy(last.own.data(), &header, sizeof header);
  std::memcpy(last.own.data() + sizeof header, &kind, sizeof kind);
  const std::span<const std::byte> own = last.own;
  check_.begin();
  check_.add(own.first(offsetof(bounded::control_header, check)));
  check_.add(own.subspan(sizeof header));
  last.rest = {own};
  for (const auto segment : last.what.segments()) {
    check_.add(segment);
    if (!segment.empty()) last.rest.push_back(segment);
  }
  header.check = check_.value();
  std::memcpy(last.own.data(), &header, sizeof header);
  ++unsent_messages_;
}

bool control_channel::write() {
  while (!unsent_.empty()) {
    std::array<iovec, 64> pieces{};
    std::size_t count = 0;
    for (auto each = unsent_.begin(); each != unsent_.end() && count < pieces.size(); ++each) {
      for (const auto bytes : each->rest) {
        if (count == pieces.size()) break;
        pieces[count++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};  // it is not written to
      }
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(connection_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    for (auto left = static_cast<std::size_t>(sent);
         left > 0 || (!unsent_.empty() && unsent_[0].rest.empty());) {
      piece& first = unsent_.front();
      std::size_t whole = 0;
      while (whole < first.rest.size() && first.rest[whole].size() <= left)
        left -= first.rest[whole++].size();
      first.rest.erase(first.rest.begin(), first.rest.begin() + static_cast<std::ptrdiff_t>(whole));
      if (!first.rest.empty()) {
        first.rest[0] = first.rest[0].subspan(left);
        break;
      }
      unsent_messages_ -= first.ends_message ? 1 : 0;
      unsent_.pop_front();
    }
  }
  return true;
}

control_channel::arrival control_channel::read(std::size_t room) {
  if (error_) return arrival::refused;
  for (std::size_t taken_now = 0; taken_now <= most_bytes_a_read;) {
    if (filled_ == wanted_ && wanted_ == control_header_bytes) {
      const arrival begun = begin_body(room);
      if (begun != arrival::message) return begun;
    }
    if (filled_ == wanted_) return finish();
    const std::size_t count = std::min(wanted_, incoming_.size()) - filled_;
    const ssize_t taken = recv(connection_.get(), incoming_.data() + filled_, count, MSG_DONTWAIT);
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

// The header is there: how much follows.
control_channel::arrival control_channel::begin_body(std::size_t room) {
  const std::span<const std::byte> bytes(incoming_.data(), control_header_bytes);
  const auto type = static_cast<bounded::control_type>(bytes[offsetof(bounded::control_header, type)]);
  header_ = bounded::read_control_header(bytes, limits_.of(type), error_);
  const bool is_message = header_.type == bounded::control_type::message;
  if (!error_ && is_message && header_.body_bytes < sizeof(message_kind)) {
    error_ = bounded::bounded_errc::wrong_length;
  }
  if (error_) return arrival::refused;
  if (is_message && header_.body_bytes > room) return arrival::held;
  wanted_ = control_header_bytes + header_.body_bytes;
  if (incoming_.size() < wanted_) grow();
  return arrival::message;
}

void control_channel::grow() {
  incoming_.resize(std::min(wanted_, filled_ + std::max(growth_bytes, filled_)));
}

control_channel::arrival control_channel::finish() {
  const std::span<const std::byte> whole(incoming_.data(), wanted_);
  message_ = bounded::read_control(whole, limits_.of(header_.type), check_, error_);
  filled_ = 0;
  wanted_ = control_header_bytes;
  return error_ ? arrival::refused : arrival::message;
}

message_kind control_channel::kind() const {
  message_kind kind{};
  std::memcpy(&kind, message_.body.data(), sizeof kind);
  return kind;
}

std::shared_ptr<std::vector<std::byte>> control_channel::take_message() {
  incoming_.resize(control_header_bytes + message_.body.size());
  auto taken = std::make_shared<std::vector<std::byte>>(std::exchange(incoming_, {}));
  incoming_.resize(control_header_bytes);
  return taken;
}

void set_control_options(int connection, unsigned timeout_ms) {
  const auto set = [&](int level, int option, int value, const char* name) {
    if (setsockopt(connection, level, option, &value, sizeof value) != 0) throw_system_error(name);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::min(timeout_ms, 0x7fffffffU)), "TCP_USER_TIMEOUT");
  // A TICK behind a message shows that it was lost, but not that it was lost again: until something is acknowledged TCP lets no third
  // segment out, and waits for its timer, 200 ms at least. Systems before Linux 6.15 have no other; the route's rto_min helps there.
  // Two ticks of the system's clock are the least that it takes.
  const int least_of_most = 5000;
  const int least_of_slow_clocks = 20'000;
  for (const int microseconds : {least_of_most, least_of_slow_clocks}) {
    if (setsockopt(connection, IPPROTO_TCP, least_timeout_us, &microseconds, sizeof microseconds) == 0) break;
  }
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  if (getsockname(connection, reinterpret_cast<sockaddr*>(&local), &length) != 0) {
    throw_system_error("getsockname");
  }
  const bool is_v6 = local.ss_family == AF_INET6;
  set(is_v6 ? IPPROTO_IPV6 : IPPROTO_IP, is_v6 ? IPV6_TCLASS : IP_TOS, class_selector_5,
      "the class of control");
}

}  // namespace lab
