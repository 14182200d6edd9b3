// SPDX-License-Identifier: MIT
// The thread of a udp_transport: what comes, what is to go, and when.
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "messages/udp/clock.hpp"
#include "messages/udp/udp_transport.hpp"

namespace lab {
namespace {

namespace bounded = lamina::bounded;
using bounded::instant;

// Keys of what epoll says, behind the places of the peers and those of the paths.
constexpr std::size_t timer_key = static_cast<std::size_t>(-1);
constexpr std::size_t event_key = static_cast<std::size_t>(-2);

// Before the control connections are looked at again.
constexpr std::size_t most_datagrams = 512;
constexpr std::size_t most_packets = 256;
// Within what a pacer lets go at once: one wake for all packets of so long.
constexpr std::chrono::microseconds shortest_nap{500};

// Class and precedence of a tag: AF41 and AF43 in front of the layout, AF11 and AF13 at its end.
std::uint8_t type_of_service(std::uint8_t tag) {
  const unsigned position = tag & 3U;
  const bool is_droppable = (tag & bounded::droppable_tag) != 0;
  return static_cast<std::uint8_t>(0x88U - 0x20U * position + (is_droppable ? 0x10U : 0U));
}

void drain(int number) {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t bytes = ::read(number, &count, sizeof count);
}

}  // namespace

void udp_transport::prepare_thread() {
  epoll_ = descriptor(epoll_create1(EPOLL_CLOEXEC));
  timer_ = descriptor(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  event_ = descriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!epoll_.is_open() || !timer_.is_open() || !event_.is_open()) throw_system_error("epoll");
  watched_.assign(peers_.size() + paths_.size(), 0);
  ready_.resize(watched_.size() + 2);
  std::uint32_t none = 0;
  watch(timer_.get(), none, EPOLLIN, timer_key);
  none = 0;
  watch(event_.get(), none, EPOLLIN, event_key);
  watch();
}

void udp_transport::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t bytes = ::write(event_.get(), &one, sizeof one);
}

void udp_transport::run() {
  try {
    while (!is_over()) turn();
  } catch (...) {
    const std::scoped_lock held(mutex_);
    failure_ = std::current_exception();
    settled_.notify_all();
  }
}

// All that is ready is read, then all that is to be said is said. What the rank waits for may have come.
void udp_transport::turn() {
  const instant before =
      clock_now();  // whoever was not heard until here was not heard of in what is read below
  const int count = epoll_wait(epoll_.get(), ready_.data(), static_cast<int>(ready_.size()), -1);
  if (count < 0 && errno != EINTR) throw_system_error("epoll_wait");

  const std::scoped_lock held(mutex_);
  read(std::span(ready_).first(static_cast<std::size_t>(std::max(count, 0))), clock_now());
  if (count >= 0) {
    for (udp_peer& each : peers_) each.judge(before);
  }
  const instant now = clock_now();
  say_and_send(now);
  watch();
  set_timer(next_deadline());
  if (is_waited_for_ && is_waited_for_()) settled_.notify_all();
}

void udp_transport::read(std::span<const epoll_event> ready, instant now) {
  for (const epoll_event& each : ready) {
    const std::size_t key = each.data.u64;
    if (key == timer_key) {
      drain(timer_.get());
    } else if (key == event_key) {
      drain(event_.get());
    } else if (key >= peers_.size()) {
      if ((each.events & EPOLLIN) != 0) read_path(paths_[key - peers_.size()]);
    } else {
      peers_[key].read_control(now);
    }
  }
}

void udp_transport::read_path(udp_socket& path) {
  path.receive(most_datagrams, [&](const endpoint& from, std::span<const std::byte> bytes,
                                   instant arrived_at) {
    const auto found = std::ranges::lower_bound(senders_, from, {}, &std::pair<endpoint, std::size_t>::first);
    if (found == senders_.end() || found->first != from) {
      ++foreign_;
      return;
    }
    peers_[found->second].on_datagram(bytes, arrived_at);
  });
}

void udp_transport::say_and_send(instant now) {
  const bool says_bye = end_ == end::saying_bye;
  if (says_bye && !std::exchange(has_said_bye_, true)) {
    for (udp_peer& each : peers_) each.say_bye();
  }
  // What a transfer that has ended still had under way points to a frame that may be gone.
  for (udp_peer& each : peers_) {
    if (each.is_sending_frame() || packets_have_gone()) continue;
    for (udp_socket& path : paths_) {
      for (const endpoint& to : each.paths()) path.drop(to);
    }
  }
  tell_load();
  for (udp_peer& each : peers_) each.say(now, packets_have_gone());
  if (send_packets(now)) {
    for (udp_peer& each : peers_) each.say(now, true);  // PROBE, behind the last packet
  }
}

bool udp_transport::packets_have_gone() const {
  return std::ranges::all_of(paths_, [](const udp_socket& each) { return each.is_empty(); });
}

// The transfer that began first has the link, and others what it leaves: who has its parameters first computes and answers while
// others get theirs. With a packet of each in turn all would have them at the end, and answer at once. Whether all that
// were let go have gone.
bool udp_transport::send_packets(instant now) {
  const double rate = options_.link_bits > 0 ? static_cast<double>(options_.link_bits) : 10e9;
  const auto has_room = [](const udp_socket& each) { return each.has_room(); };
  const auto next_of = [&](std::size_t place) -> std::optional<bounded::outgoing_packet> {
    if (!peers_[place].is_streaming()) return std::nullopt;
    link_at_ = link_.when(now, rate, largest_bits_);
    return link_at_ > now ? std::nullopt : peers_[place].next_packet(now);
  };
  link_at_ = now;
  std::size_t count = 0;
  for (const std::size_t place : sending_order_) {
    while (count < most_packets && std::ranges::all_of(paths_, has_room)) {
      const auto packet = next_of(place);
      if (!packet) break;
      link_.spend(8 * (packet->size_bytes() + bounded::packet_overhead_bytes));
      const std::size_t path = next_path_[place]++ % paths_.size();
      paths_[path].put(peers_[place].paths()[path], *packet,
                       options_.frames.has_tags ? type_of_service(packet->tag) : std::uint8_t{0});
      ++count;
    }
  }
  bool have_gone = true;
  for (udp_socket& each : paths_) have_gone = each.flush() && have_gone;
  return have_gone;
}

void udp_transport::tell_load() {
  const auto open = static_cast<std::uint32_t>(
      std::ranges::count_if(peers_, [](const udp_peer& each) { return each.is_open(); }));
  const std::uint64_t granted = open > 0 ? options_.link_bits / open : options_.link_bits;
  for (udp_peer& each : peers_) each.set_load(std::max(open, 1U), granted);
}

// Which events each socket is waited for with.
void udp_transport::watch() {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    udp_peer& each = peers_[i];
    if (!each.is_here()) continue;  // closed, which epoll knows
    const std::uint32_t in = each.is_held() ? 0U : std::uint32_t{EPOLLIN};
    const std::uint32_t out = each.channel().has_unsent() ? std::uint32_t{EPOLLOUT} : 0U;
    watch(each.channel().descriptor_number(), watched_[i], in | out, i);
  }
  for (std::size_t i = 0; i < paths_.size(); ++i) {
    const std::uint32_t out = paths_[i].is_empty() ? 0U : std::uint32_t{EPOLLOUT};
    watch(paths_[i].descriptor_number(), watched_[peers_.size() + i], EPOLLIN | out, peers_.size() + i);
  }
}

void udp_transport::watch(int number, std::uint32_t& now, std::uint32_t wanted, std::size_t key) {
  constexpr std::uint32_t is_watched = 1U << 31U;  // also where no event is wanted
  if (now == (wanted | is_watched)) return;
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = key;
  if (epoll_ctl(epoll_.get(), now == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, number, &event) != 0)
    throw_system_error("epoll_ctl");
  now = wanted | is_watched;
}

instant udp_transport::next_deadline() const {
  const bool have_gone = packets_have_gone();
  instant next = bounded::never;
  for (const udp_peer& each : peers_) {
    next = std::min(next, each.deadline(have_gone));
    if (!have_gone || !each.is_here() || !each.is_streaming())
      continue;  // the system says when there is room
    next = std::min(next, std::max({each.packet_deadline(), link_at_, clock_now() + shortest_nap}));
  }
  if (end_ == end::saying_bye) next = std::min(next, end_at_);
  return next;
}

void udp_transport::set_timer(instant at) {
  // 0 would switch it off.
  const auto nanoseconds = std::max<instant::rep>(at.count(), 1);
  itimerspec when{};
  when.it_value.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000);
  when.it_value.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
  if (timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr) != 0)
    throw_system_error("timerfd_settime");
}

bool udp_transport::is_over() {
  const std::scoped_lock held(mutex_);
  if (end_ == end::at_once) return true;
  if (end_ == end::none) return false;
  const bool are_gone = std::ranges::none_of(peers_, &udp_peer::is_here);
  return are_gone || clock_now() >= end_at_;
}

}  // namespace lab
