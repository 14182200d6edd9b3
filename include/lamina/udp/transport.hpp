// SPDX-License-Identifier: MIT
#pragma once

/// Frames between the ranks of a run: the class that a program uses, and its thread. Read last, or first and then only what it names.

#include <sys/eventfd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "lamina/udp/peer.hpp"

namespace lamina::inline LAMINA_ABI::udp {

/// Since the transport was made.
struct peer_counters {
  bounded::sender_counters sent;     ///< to it
  bounded::receiver_counters taken;  ///< from it, by their fate
  std::uint32_t rounds = 0;          ///< of the last transfer to it
};
struct transport_counters {
  std::vector<socket_counters> paths;  ///< of each path
  std::uint64_t foreign = 0;           ///< packets from addresses that no peer has told
  std::vector<peer_counters> peers;    ///< in the order of the options'
};

/// One rank's end. Frames go as packets over UDP, of which some may be lost; control goes over one TCP connection a pair. Between two
/// ranks frames arrive in the order in which they were sent.
///
/// One thread of its own does all input and output, so that packets are taken and questions answered while the rank computes. The rank
/// calls from one thread at a time, and sleeps until what it waits for is there. Each call that waits throws peers_lost, naming the ranks,
/// when one closes its connection, says nothing for its timeout, or does not do within `within` what is waited for; error with a sentence,
/// when one broke the protocol; and what the thread threw. Ranks that are no peers are a std::logic_error. Memory is bounded: one frame of
/// each peer.
class transport {
 public:
  /// This rank meets its peers.
  ///
  /// \param here     what this rank has opened
  /// \param all      where every rank is, by rank; where a rank's port is known beforehand, it need not have started
  /// \param options  the same at every rank
  /// \throws std::invalid_argument  options that contradict each other
  /// \throws error, peers_lost      naming who cannot be reached, was started otherwise, has another secret, or did not come
  transport(open_sockets here, std::span<const rank_addresses> all, const transport_options& options)
      : options_(checked(options, here, all)),
        paths_(std::move(here.paths)),
        link_(largest_packet_bits()),
        event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!event_.is_open()) detail::throw_system_error("eventfd");
    auto connections = detail::meeting(here.listener.get(), all, options_).run();
    for (std::size_t i = 0; i < options_.peers.size(); ++i) {
      const peer_options& each = options_.peers[i];
      detail::set_control_options(connections[i].get(), static_cast<unsigned>(each.timeout.count()));
      peers_.emplace_back(options_, each, std::move(connections[i]), all[each.rank], detail::clock_now());
      detail::peer& made = peers_.back();
      for (const endpoint& from : made.paths()) senders_.emplace_back(from, &made);
      sending_order_.push_back(&made);
    }
    std::ranges::sort(senders_);
    watch();
    thread_ = std::thread([this] { run(); });
  }
  transport(const transport&) = delete;
  transport& operator=(const transport&) = delete;
  /// Says BYE and waits for that of the others, which are not longer in coming than a timeout. Where the rank ends by an exception
  /// its connections are closed at once.
  ~transport() {
    {
      const std::scoped_lock held(mutex_);
      end_at_ = bounded::instant(0);
      if (std::uncaught_exceptions() == 0) {
        for (detail::peer& each : peers_) {
          each.say_bye();
          end_at_ = (std::max)(end_at_, detail::clock_now() + each.timeout());
        }
      }
      wake();
    }
    thread_.join();
  }

  [[nodiscard]] std::size_t rank() const noexcept { return options_.rank; }
  [[nodiscard]] std::size_t ranks() const noexcept { return options_.ranks; }

  /// The same frame to each of `to`; returns when each has as much of it as it must, and says what that is: what to commit. The frame
  /// stays as it is until then. A receiver that is lost ends its own transfer only: peers_lost has what became of it at the others.
  ///
  /// \param to      the ranks that receive it
  /// \param frame   its fragments, with the memory they point into
  /// \param owed    what each receiver must get whatever the bound says: none, or one a receiver
  /// \param within  how long
  /// \throws std::invalid_argument  what bounded_sender::begin() throws
  std::vector<std::optional<delivery>> send_frame(std::span<const std::size_t> to,
                                                  const bounded::frame_chunks& frame,
                                                  std::span<const bounded::obligations> owed = {},
                                                  bounded::instant within = bounded::never) {
    std::unique_lock held(mutex_);
    const auto has_gone = [](const detail::peer& each) { return each.has_sent_frame(); };
    std::vector<std::optional<delivery>> sent(to.size());
    const auto collect = [&] {
      for (std::size_t i = 0; i < to.size(); ++i)
        if (has_gone(peer(to[i]))) sent[i] = peer(to[i]).take_sent();
    };
    // The frame may be gone when this ends by an exception.
    const auto abandon = [&] {
      for (const std::size_t rank : to) peer(rank).abandon_frame();
    };
    try {
      for (std::size_t i = 0; i < to.size(); ++i) {
        if (!peer(to[i]).is_here()) continue;
        peer(to[i]).release(detail::clock_now());
        peer(to[i]).begin_frame(frame, owed.empty() ? bounded::obligations() : owed[i]);
        // After those that have begun.
        const auto found = std::ranges::find(sending_order_, &peer(to[i]));
        std::rotate(found, found + 1, sending_order_.end());
      }
      wake();
      wait(held, to, "sending to", within, false, has_gone);
    } catch (const peers_lost& loss) {
      abandon();
      collect();
      throw peers_lost(loss.what(), loss.ranks(), std::move(sent));
    } catch (...) {
      abandon();
      throw;
    }
    collect();
    return sent;
  }

  /// One frame from each, in their order. What the last ones gave is gone.
  std::vector<arrival> receive_from_each(std::span<const std::size_t> from,
                                         bounded::instant within = bounded::never) {
    std::unique_lock held(mutex_);
    for (const std::size_t rank : from) peer(rank).release(detail::clock_now());
    wait(held, from, "waiting for", within, true,
         [](const detail::peer& each) { return each.has_arrival(); });
    std::vector<arrival> all;
    for (const std::size_t rank : from) all.push_back(peer(rank).take_arrival());
    return all;
  }
  arrival receive(std::size_t from, bounded::instant within = bounded::never) {
    return std::move(receive_from_each({&from, 1}, within)[0]);
  }

  [[nodiscard]] transport_counters counters() {
    const std::scoped_lock held(mutex_);
    transport_counters all{.paths = {}, .foreign = foreign_, .peers = {}};
    for (const packet_socket& each : paths_) all.paths.push_back(each.counters());
    for (const detail::peer& each : peers_)
      all.peers.push_back({each.sender.counters(), each.receiver.counters(), each.sender.round() + 1});
    return all;
  }

 private:
  using sender = std::pair<endpoint, detail::peer*>;  // an address that packets come from

  // Before the control connections are looked at again.
  static constexpr std::size_t most_datagrams = 512;
  static constexpr std::size_t most_packets = 256;
  // Within what a pacer lets go at once: one wake for all packets of so long.
  static constexpr std::chrono::microseconds shortest_nap{500};

  static const transport_options& checked(const transport_options& options, const open_sockets& here,
                                          std::span<const rank_addresses> all) {
    std::vector<std::size_t> ranks = {options.rank};
    for (const peer_options& each : options.peers) ranks.push_back(each.rank);
    std::ranges::sort(ranks);
    if (options.ranks > 65'536 || all.size() != options.ranks || ranks.back() >= options.ranks ||
        std::ranges::adjacent_find(ranks) != ranks.end()) {
      lamina::detail::refuse("rank ", options.rank, " with peers ", options.names(std::span(ranks)),
                             ": each is one of ", options.ranks, " ranks, and once, and has one of ",
                             all.size(), " addresses");
    }
    const auto paths = [](const rank_addresses& of) {
      return std::to_string(of.paths) + " paths of IPv" + (of.control.is_v6 != 0 ? "6" : "4");
    };
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].paths == 0 || paths(all[rank]) != paths(here.addresses))
        throw error(options.name(rank) + " has " + paths(all[rank]) + ", " + options.name(options.rank) +
                    " has " + paths(here.addresses));
    }
    return options;
  }

  detail::peer& peer(std::size_t rank) {
    const auto found = std::ranges::find(options_.peers, rank, &peer_options::rank);
    if (found == options_.peers.end())
      lamina::detail::refuse<std::logic_error>("rank ", options_.rank, " does not talk to ", rank);
    return peers_[static_cast<std::size_t>(found - options_.peers.begin())];
  }

  // Sleeps until each of them is done or lost, or one is wrong; or one is lost, if nothing else is to be waited for then. Who is lost
  // meanwhile is what this ends with.
  template <class IsDone>
  void wait(std::unique_lock<std::mutex>& held, std::span<const std::size_t> ranks, const char* doing,
            bounded::instant within, bool ends_at_loss, IsDone is_done) {
    const auto is_settled = [&] {
      bool are_all = true;
      for (const std::size_t rank : ranks) {
        const detail::peer& each = peer(rank);
        if (is_done(each)) continue;
        if (each.is_wrong() || (ends_at_loss && !each.is_here())) return true;
        are_all = are_all && !each.is_here();
      }
      return are_all || failure_ != nullptr;
    };
    for (const std::size_t rank : ranks) peer(rank).set_awaited(true);
    is_waited_for_ = is_settled;
    wake();
    const bool is_in_time = settled_.wait_for(held, within, is_settled);
    is_waited_for_ = nullptr;
    for (const std::size_t rank : ranks) peer(rank).set_awaited(false);
    if (failure_) std::rethrow_exception(failure_);
    std::vector<std::size_t> lost;
    std::string why;
    for (const std::size_t rank : ranks) {
      const detail::peer& each = peer(rank);
      if (is_done(each) || (each.is_here() && is_in_time)) continue;
      if (each.is_wrong()) throw error(each.why());
      lost.push_back(rank);
      if (!each.is_here()) why = each.why();
    }
    if (lost.empty()) return;
    if (why.empty()) {
      const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(within);
      why = "not done within " + std::to_string(ms.count()) + " ms";
    }
    throw peers_lost(why + " while " + doing + " " + options_.names(lost), lost);
  }

  void wake() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t bytes = ::write(event_.get(), &one, sizeof one);
  }

  // From here on, the thread.
  void run() {
    try {
      while (!is_over()) turn();
    } catch (...) {
      const std::scoped_lock held(mutex_);
      failure_ = std::current_exception();
      settled_.notify_all();
    }
  }
  bool is_over() {
    const std::scoped_lock held(mutex_);
    if (end_at_ == bounded::never) return false;
    return std::ranges::none_of(peers_, &detail::peer::is_here) || detail::clock_now() >= end_at_;
  }

  // All that is ready is read, then all that is to be said is said. What the rank waits for may have come.
  void turn() {
    // Whoever was not heard until here was not heard of in what is read below.
    const bounded::instant before = detail::clock_now();
    const bounded::instant nap = (std::max)(wake_at_ - before, bounded::instant(0));
    const timespec until{static_cast<time_t>(nap.count() / 1'000'000'000),
                         static_cast<long>(nap.count() % 1'000'000'000)};
    const int count = ::ppoll(watched_.data(), watched_.size(), &until, nullptr);
    if (count < 0 && errno != EINTR) detail::throw_system_error("ppoll");

    const std::scoped_lock held(mutex_);
    if (count >= 0) {
      for (std::size_t i = 0; i < watched_.size(); ++i)
        if (watched_[i].revents != 0) read(i);
      for (detail::peer& each : peers_) each.judge(before);
    }
    say_and_send(detail::clock_now());
    watch();
    if (is_waited_for_ && is_waited_for_()) settled_.notify_all();
  }

  // Places in `watched_`: the peers, the paths, and the event by which the rank wakes this thread.
  void read(std::size_t place) {
    if (place < peers_.size()) {
      peers_[place].read_control(detail::clock_now());
    } else if (place == peers_.size() + paths_.size()) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t bytes = ::read(event_.get(), &count, sizeof count);
    } else if ((watched_[place].revents & POLLIN) != 0) {
      const auto take = [&](const endpoint& from, std::span<const std::byte> bytes, bounded::instant at) {
        const auto found = std::ranges::lower_bound(senders_, from, {}, &sender::first);
        if (found == senders_.end() || found->first != from) {
          ++foreign_;
        } else {
          found->second->receiver.on_datagram(bytes, at);
        }
      };
      paths_[place - peers_.size()].receive(most_datagrams, take);
    }
  }

  void say_and_send(bounded::instant now) {
    // What a transfer that has ended still had under way points to a frame that may be gone.
    for (const detail::peer& each : peers_) {
      if (each.sender.is_under_way() || packets_have_gone()) continue;
      for (packet_socket& path : paths_)
        for (const endpoint& to : each.paths()) path.drop(to);
    }
    std::uint32_t open = 0;
    for (const detail::peer& each : peers_)
      open += each.receiver.state() == bounded::receiver_state::open ? 1 : 0;
    open = (std::max)(open, 1U);
    for (detail::peer& each : peers_) {
      each.receiver.set_load(open, options_.rate.link_bits / open);
      each.say(now, packets_have_gone());
    }
    if (!send_packets(now)) return;
    for (detail::peer& each : peers_) each.say(now, true);  // PROBE, after the last packet
  }
  [[nodiscard]] bool packets_have_gone() const {
    return std::ranges::all_of(paths_, &packet_socket::is_empty);
  }

  // The transfer that began first has the link, and others what it leaves: who has its parameters first computes and replies while others
  // get theirs. With a packet of each in turn all would have them at the end, and reply at once. Whether all that were let go have gone.
  bool send_packets(bounded::instant now) {
    const double rate = options_.rate.link_bits > 0 ? static_cast<double>(options_.rate.link_bits) : 10e9;
    const std::size_t largest_bits = largest_packet_bits();
    link_at_ = now;
    std::size_t count = 0;
    for (detail::peer* const to : sending_order_) {
      while (count < most_packets && to->is_streaming() &&
             std::ranges::all_of(paths_, &packet_socket::has_room)) {
        link_at_ = link_.when(now, rate, largest_bits);
        if (link_at_ > now) break;
        const std::size_t path = to->sender.counters().packets % paths_.size();  // each in turn
        const auto packet = to->sender.next_packet(now);
        if (!packet) break;
        link_.spend(8 * (packet->size_bytes() + bounded::packet_overhead_bytes));
        const std::uint8_t service = options_.has_classes ? type_of_service(packet->tag) : std::uint8_t{0};
        paths_[path].put(to->paths()[path], *packet, service);
        ++count;
      }
    }
    bool have_gone = true;
    for (packet_socket& each : paths_) have_gone = each.flush() && have_gone;
    return have_gone;
  }
  // Class and precedence of a tag: AF41 and AF43 at the front of the layout, AF11 and AF13 at its end.
  static std::uint8_t type_of_service(std::uint8_t tag) {
    const bool is_droppable = (tag & bounded::droppable_tag) != 0;
    return static_cast<std::uint8_t>(0x88U - 0x20U * (tag & 3U) + (is_droppable ? 0x10U : 0U));
  }
  // On the wire.
  [[nodiscard]] std::size_t largest_packet_bits() const {
    std::size_t most = 0;
    for (const peer_options& each : options_.peers) {
      for (const bounded::chunk_grid* grid : {&each.sends, &each.takes})
        most = (std::max)(most, grid->chunk_elements() * grid->element_bytes());
    }
    return 8 * (most + bounded::packet_header_bytes + bounded::packet_overhead_bytes);
  }

  // Which events each socket is waited for with, and until when.
  void watch() {
    watched_.clear();
    // Of one that is gone none: a number below 0 is passed over.
    for (const detail::peer& each : peers_)
      watch(each.channel().descriptor_number(), each.channel().has_unsent());
    for (const packet_socket& each : paths_) watch(each.descriptor_number(), !each.is_empty());
    watch(event_.get(), false);

    const bool have_gone = packets_have_gone();
    wake_at_ = end_at_;
    for (const detail::peer& each : peers_) {
      wake_at_ = (std::min)(wake_at_, each.deadline(have_gone));
      if (!have_gone || !each.is_streaming()) continue;  // the system says when there is room
      wake_at_ = (std::min)(
          wake_at_, (std::max)({each.sender.deadline(), link_at_, detail::clock_now() + shortest_nap}));
    }
  }
  void watch(int descriptor, bool writes) {
    watched_.push_back({descriptor, static_cast<short>(POLLIN | (writes ? POLLOUT : 0)), 0});
  }

  const transport_options options_;
  std::vector<packet_socket> paths_;
  std::vector<sender> senders_;               // sorted
  std::vector<detail::peer*> sending_order_;  // who began a frame last at the end
  bounded::pacer link_;                       // that all transfers share
  bounded::instant link_at_{};                // when another packet may go
  std::uint64_t foreign_ = 0;
  detail::descriptor event_;
  std::vector<pollfd> watched_;
  bounded::instant wake_at_{};

  std::mutex mutex_;  // of all below, and of what the calls above use
  std::condition_variable settled_;
  std::function<bool()> is_waited_for_;  // what the rank sleeps until; empty: it does not
  std::exception_ptr failure_;           // of the thread, which has ended
  std::deque<detail::peer> peers_;       // in the order of the options'
  bounded::instant end_at_ =
      bounded::never;  // when the thread ends at the latest; never: it was not asked to
  std::thread thread_;
};

}  // namespace lamina::inline LAMINA_ABI::udp
