// SPDX-License-Identifier: MIT
#pragma once

/// The thread of a transport: what comes, what is to go, and when. Read after peer.hpp, before transport.hpp.

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/udp/peer.hpp"

namespace lamina::inline LAMINA_ABI::udp::detail {

/// Does all input and output of a rank in one thread, so that packets are taken and questions answered while the rank computes. The
/// rank's thread calls everything below `mutex` while it holds it.
class engine {
 public:
  engine(transport_options given, std::vector<packet_socket> paths, std::span<const rank_addresses> all,
         std::vector<descriptor> connections)
      : options(std::move(given)),
        paths_(std::move(paths)),
        sending_order_(options.peers.size()),
        next_path_(options.peers.size(), 0),
        link_(largest_packet_bits()),
        event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!event_.is_open()) throw_system_error("eventfd");
    const bounded::instant now = clock_now();
    for (std::size_t i = 0; i < options.peers.size(); ++i) {
      const peer_options& each = options.peers[i];
      const rank_addresses& theirs = all[each.rank];
      for (std::uint32_t p = 0; p < theirs.paths; ++p) senders_.emplace_back(theirs.data.at(p), i);
      set_control_options(connections[i].get(), static_cast<unsigned>(each.timeout.count()));
      peers.emplace_back(options, each, std::move(connections[i]), theirs, now);
    }
    std::ranges::sort(senders_);
    std::iota(sending_order_.begin(), sending_order_.end(), std::size_t{0});
    watch();
    thread_ = std::thread([this] { run(); });
  }
  engine(const engine&) = delete;
  engine& operator=(const engine&) = delete;
  /// Says BYE and waits for that of the others, which are not longer in coming than a timeout. Where the rank ends by an exception
  /// its connections are closed at once.
  ~engine() {
    {
      const std::scoped_lock held(mutex);
      end_ = std::uncaught_exceptions() > 0 ? end::at_once : end::saying_bye;
      end_at_ = clock_now();
      for (const peer& each : peers) end_at_ = (std::max)(end_at_, clock_now() + each.timeout());
      wake();
    }
    thread_.join();
  }

  const transport_options options;
  std::mutex mutex;
  std::condition_variable settled;
  std::function<bool()> is_waited_for;  ///< what the rank sleeps until; empty: it does not
  std::exception_ptr failure;           ///< of the thread, which has ended
  std::deque<peer> peers;               ///< in the order of the options'

  void wake() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t bytes = ::write(event_.get(), &one, sizeof one);
  }
  /// A frame begins to go to this peer: after those that have begun.
  void queue_frame(std::size_t place) {
    const auto found = std::ranges::find(sending_order_, place);
    std::rotate(found, found + 1, sending_order_.end());
  }
  [[nodiscard]] std::vector<socket_counters> path_counters() const {
    std::vector<socket_counters> all;
    for (const packet_socket& each : paths_) all.push_back(each.counters());
    return all;
  }
  /// Packets from addresses that no peer has told.
  [[nodiscard]] std::uint64_t foreign() const noexcept { return foreign_; }

 private:
  enum class end : std::uint8_t { none, saying_bye, at_once };

  // Before the control connections are looked at again.
  static constexpr std::size_t most_datagrams = 512;
  static constexpr std::size_t most_packets = 256;
  // Within what a pacer lets go at once: one wake for all packets of so long.
  static constexpr std::chrono::microseconds shortest_nap{500};

  // Class and precedence of a tag: AF41 and AF43 at the front of the layout, AF11 and AF13 at its end.
  static std::uint8_t type_of_service(std::uint8_t tag) {
    const bool is_droppable = (tag & bounded::droppable_tag) != 0;
    return static_cast<std::uint8_t>(0x88U - 0x20U * (tag & 3U) + (is_droppable ? 0x10U : 0U));
  }
  // On the wire.
  [[nodiscard]] std::size_t largest_packet_bits() const {
    std::size_t most = 0;
    for (const peer_options& each : options.peers) {
      for (const bounded::chunk_grid* grid : {&each.sends, &each.takes})
        most = (std::max)(most, grid->chunk_elements() * grid->element_bytes());
    }
    return 8 * (most + bounded::packet_header_bytes + bounded::packet_overhead_bytes);
  }

  void run() {
    try {
      while (!is_over()) turn();
    } catch (...) {
      const std::scoped_lock held(mutex);
      failure = std::current_exception();
      settled.notify_all();
    }
  }
  bool is_over() {
    const std::scoped_lock held(mutex);
    if (end_ != end::saying_bye) return end_ == end::at_once;
    return std::ranges::none_of(peers, &peer::is_here) || clock_now() >= end_at_;
  }

  // All that is ready is read, then all that is to be said is said. What the rank waits for may have come.
  void turn() {
    // Whoever was not heard until here was not heard of in what is read below.
    const bounded::instant before = clock_now();
    const bounded::instant nap = (std::max)(wake_at_ - before, bounded::instant(0));
    const timespec until{static_cast<time_t>(nap.count() / 1'000'000'000),
                         static_cast<long>(nap.count() % 1'000'000'000)};
    const int count = ::ppoll(watched_.data(), watched_.size(), &until, nullptr);
    if (count < 0 && errno != EINTR) throw_system_error("ppoll");

    const std::scoped_lock held(mutex);
    if (count >= 0) {
      for (std::size_t i = 0; i < watched_.size(); ++i) {
        if (watched_[i].revents != 0) read(i);
      }
      for (peer& each : peers) each.judge(before);
    }
    say_and_send(clock_now());
    watch();
    if (is_waited_for && is_waited_for()) settled.notify_all();
  }

  // Places in `watched_`: the peers, the paths, and the event by which the rank wakes this thread.
  void read(std::size_t place) {
    if (place < peers.size()) {
      peers[place].read_control(clock_now());
    } else if (place < peers.size() + paths_.size()) {
      if ((watched_[place].revents & POLLIN) != 0) read_path(paths_[place - peers.size()]);
    } else {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t bytes = ::read(event_.get(), &count, sizeof count);
    }
  }
  void read_path(packet_socket& path) {
    path.receive(most_datagrams,
                 [&](const endpoint& from, std::span<const std::byte> bytes, bounded::instant arrived_at) {
                   const auto found =
                       std::ranges::lower_bound(senders_, from, {}, &std::pair<endpoint, std::size_t>::first);
                   if (found == senders_.end() || found->first != from) {
                     ++foreign_;
                   } else {
                     peers[found->second].on_datagram(bytes, arrived_at);
                   }
                 });
  }

  void say_and_send(bounded::instant now) {
    if (end_ == end::saying_bye && !std::exchange(has_said_bye_, true)) {
      for (peer& each : peers) each.say_bye();
    }
    // What a transfer that has ended still had under way points to a frame that may be gone.
    for (const peer& each : peers) {
      if (each.sender().is_under_way() || packets_have_gone()) continue;
      for (packet_socket& path : paths_) {
        for (const endpoint& to : each.paths()) path.drop(to);
      }
    }
    const auto open = static_cast<std::uint32_t>(std::ranges::count_if(
        peers, [](const peer& each) { return each.receiver().state() == bounded::receiver_state::open; }));
    for (peer& each : peers) {
      each.set_load((std::max)(open, 1U), options.rate.link_bits / (std::max)(open, 1U));
      each.say(now, packets_have_gone());
    }
    if (!send_packets(now)) return;
    for (peer& each : peers) each.say(now, true);  // PROBE, after the last packet
  }
  [[nodiscard]] bool packets_have_gone() const {
    return std::ranges::all_of(paths_, [](const packet_socket& each) { return each.is_empty(); });
  }

  // The transfer that began first has the link, and others what it leaves: who has its parameters first computes and replies while
  // others get theirs. With a packet of each in turn all would have them at the end, and reply at once. Whether all that were let go
  // have gone.
  bool send_packets(bounded::instant now) {
    const double rate = options.rate.link_bits > 0 ? static_cast<double>(options.rate.link_bits) : 10e9;
    const std::size_t largest_bits = largest_packet_bits();
    const auto have_room = [this] {
      return std::ranges::all_of(paths_, [](const packet_socket& each) { return each.has_room(); });
    };
    link_at_ = now;
    std::size_t count = 0;
    for (const std::size_t place : sending_order_) {
      peer& to = peers[place];
      while (count < most_packets && to.is_streaming() && have_room()) {
        link_at_ = link_.when(now, rate, largest_bits);
        if (link_at_ > now) break;
        const auto packet = to.next_packet(now);
        if (!packet) break;
        link_.spend(8 * (packet->size_bytes() + bounded::packet_overhead_bytes));
        const std::size_t path = next_path_[place]++ % paths_.size();
        const std::uint8_t service = options.has_classes ? type_of_service(packet->tag) : std::uint8_t{0};
        paths_[path].put(to.paths()[path], *packet, service);
        ++count;
      }
    }
    bool have_gone = true;
    for (packet_socket& each : paths_) have_gone = each.flush() && have_gone;
    return have_gone;
  }

  // Which events each socket is waited for with, and until when.
  void watch() {
    watched_.clear();
    for (const peer& each : peers) {
      const int events = (each.is_held() ? 0 : POLLIN) | (each.channel().has_unsent() ? POLLOUT : 0);
      // Of one that is gone none: a number below 0 is passed over.
      watched_.push_back({each.channel().descriptor_number(), static_cast<short>(events), 0});
    }
    for (const packet_socket& each : paths_) {
      const int events = POLLIN | (each.is_empty() ? 0 : POLLOUT);
      watched_.push_back({each.descriptor_number(), static_cast<short>(events), 0});
    }
    watched_.push_back({event_.get(), POLLIN, 0});

    const bool have_gone = packets_have_gone();
    wake_at_ = end_ == end::saying_bye ? end_at_ : bounded::never;
    for (const peer& each : peers) {
      wake_at_ = (std::min)(wake_at_, each.deadline(have_gone));
      if (!have_gone || !each.is_streaming()) continue;  // the system says when there is room
      wake_at_ =
          (std::min)(wake_at_, (std::max)({each.sender().deadline(), link_at_, clock_now() + shortest_nap}));
    }
  }

  std::vector<packet_socket> paths_;
  std::vector<std::pair<endpoint, std::size_t>> senders_;  // addresses that packets come from, sorted; places
  std::vector<std::size_t> sending_order_;  // places of the peers, who began a frame last at the end
  std::vector<std::size_t> next_path_;      // of each peer
  bounded::pacer link_;                     // that all transfers share
  bounded::instant link_at_{};              // when another packet may go
  std::uint64_t foreign_ = 0;
  descriptor event_;
  std::vector<pollfd> watched_;
  bounded::instant wake_at_{};
  end end_ = end::none;
  bounded::instant end_at_{};
  bool has_said_bye_ = false;
  std::thread thread_;
};

}  // namespace lamina::inline LAMINA_ABI::udp::detail
