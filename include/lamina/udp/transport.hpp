// SPDX-License-Identifier: MIT
#pragma once

/// Frames and messages between the ranks of a run: the class that a program uses. Read last, or first and then only what it names.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/udp/engine.hpp"

namespace lamina::inline LAMINA_ABI::udp {

/// The same of a frame: what became of it at the other ranks that were to get it.
class LAMINA_VISIBLE frame_lost : public peers_lost {
 public:
  frame_lost(const peers_lost& loss, std::vector<std::optional<delivery>> sent)
      : peers_lost(loss), sent_(std::move(sent)) {}
  /// As send_frame() would have returned it; of the lost ranks nothing has arrived.
  [[nodiscard]] const std::vector<std::optional<delivery>>& sent() const noexcept { return sent_; }

 private:
  std::vector<std::optional<delivery>> sent_;
};

/// Since the transport was made.
struct peer_counters {
  bounded::sender_counters sent;     ///< to it
  bounded::receiver_counters taken;  ///< from it, by their fate
  std::uint32_t rounds = 0;          ///< of the last transfer to it
  double rate_bits = 0;              ///< a second, at its end
};
struct transport_counters {
  std::vector<socket_counters> paths;  ///< of each path
  std::uint64_t foreign = 0;           ///< packets from addresses that no peer has told
  std::vector<peer_counters> peers;    ///< in the order of the options'
};

/// One rank's end. Frames go as packets over UDP, of which some may be lost; messages and control go over one TCP connection a pair. Between
/// two ranks everything arrives in the order in which it was sent.
///
/// One thread of its own does all input and output. The rank calls from one thread at a time, hands over what is to be sent, and sleeps
/// until it has gone or was lost. Each call that waits throws peers_lost, naming the ranks, when one closes its connection, says nothing
/// for its timeout, or does not do within `within` what is waited for; error with a sentence, when one broke the protocol; and what the
/// thread threw. Ranks that are no peers are a std::logic_error. Memory is bounded: of each peer one frame, and messages of
/// most_message_bytes.
class transport {
 public:
  static constexpr bounded::instant forever = bounded::never;

  /// This rank meets its peers.
  ///
  /// \param here     what this rank has opened
  /// \param all      where every rank is, by rank; where a rank's port is known beforehand, it need not have started
  /// \param options  the same at every rank
  /// \throws std::invalid_argument  options that contradict each other
  /// \throws error, peers_lost      naming who cannot be reached, was started otherwise, has another secret, or did not come
  transport(open_sockets here, std::span<const rank_addresses> all, const transport_options& options)
      : engine_{checked(options, here, all), std::move(here.paths), all,
                detail::meeting(here.listener.get(), all, options).run()} {}

  [[nodiscard]] std::size_t rank() const noexcept { return engine_.options.rank; }
  [[nodiscard]] std::size_t ranks() const noexcept { return engine_.options.ranks; }
  [[nodiscard]] std::string name_of(std::size_t rank) const { return engine_.options.name(rank); }

  /// These bytes, copied, to each of `to`; returns when they have gone. For what is never to be lost; frames are not copied.
  void send(std::span<const std::size_t> to, std::uint64_t tag, std::span<const std::byte> bytes,
            bounded::instant within = forever) {
    begin_send(to, tag, bytes, within);
    flush(to, within);
  }
  /// The same, which returns before they have gone, and after what was sent to these ranks before.
  void begin_send(std::span<const std::size_t> to, std::uint64_t tag, std::span<const std::byte> bytes,
                  bounded::instant within = forever) {
    lock held(engine_.mutex);
    wait_sent(held, to, within);
    for (const std::size_t rank : to) peer(rank).send_message(tag, bytes);
    engine_.wake();
  }
  /// Returns when all that has begun to go to these ranks has gone.
  void flush(std::span<const std::size_t> to, bounded::instant within = forever) {
    lock held(engine_.mutex);
    wait_sent(held, to, within);
  }

  /// The same frame to each of `to`; returns when each has as much of it as it must, and says what that is: what to commit. The frame
  /// stays as it is until then. A receiver that is lost ends its own transfer only.
  ///
  /// \param to      the ranks that receive it
  /// \param frame   its fragments, with the memory they point into
  /// \param report  what the receivers' callers are to know of the step
  /// \param owed    what each receiver must get whatever the bound says: none, or one a receiver
  /// \param within  how long, for each thing that is waited for
  /// \throws frame_lost             receivers were lost: what became of it at the others
  /// \throws std::invalid_argument  what bounded_sender::begin() throws
  std::vector<std::optional<delivery>> send_frame(std::span<const std::size_t> to,
                                                  const bounded::frame_chunks& frame,
                                                  std::span<const std::byte> report = {},
                                                  std::span<const bounded::obligations> owed = {},
                                                  bounded::instant within = forever) {
    lock held(engine_.mutex);
    std::vector<std::optional<delivery>> sent(to.size());
    try {
      wait_sent(held, to, within);
    } catch (const peers_lost& loss) {
      // The others are to have it all the same: what is lost is said at the end.
      if (loss.ranks().size() == to.size()) throw;
    }
    const auto has_gone = [](const detail::peer& each) { return each.has_sent_frame(); };
    const auto collect = [&] {
      for (std::size_t i = 0; i < to.size(); ++i) {
        if (has_gone(peer(to[i]))) sent[i] = peer(to[i]).take_sent();
      }
    };
    try {
      for (std::size_t i = 0; i < to.size(); ++i) {
        if (!peer(to[i]).is_here()) continue;
        peer(to[i]).release(detail::clock_now());
        peer(to[i]).begin_frame(frame, report, owed.empty() ? bounded::obligations() : owed[i]);
        engine_.queue_frame(place_of(to[i]));
      }
      engine_.wake();
      wait(held, to, "sending to", within, false, has_gone);
    } catch (const peers_lost& loss) {
      for (const std::size_t rank : to) peer(rank).abandon_frame();  // of those that did not do it in time
      collect();
      throw frame_lost(loss, std::move(sent));
    } catch (...) {
      for (const std::size_t rank : to) peer(rank).abandon_frame();  // the frame may be gone from here on
      throw;
    }
    collect();
    return sent;
  }

  /// One arrival from each, in their order. What the last ones gave is gone.
  std::vector<arrival> receive_from_each(std::span<const std::size_t> from,
                                         bounded::instant within = forever) {
    lock held(engine_.mutex);
    for (const std::size_t rank : from) peer(rank).release(detail::clock_now());
    wait(held, from, "waiting for", within, true,
         [](const detail::peer& each) { return each.has_arrival(); });
    std::vector<arrival> all;
    for (const std::size_t rank : from) all.push_back(peer(rank).take_arrival());
    engine_.wake();  // a connection may have been held
    return all;
  }
  /// The arrival of whichever comes first; a rank that sends much keeps no other waiting.
  arrival receive_from_any(std::span<const std::size_t> from, bounded::instant within = forever) {
    lock held(engine_.mutex);
    for (const std::size_t rank : from) peer(rank).release(detail::clock_now());
    const auto next = [&] {
      std::size_t k = 0;
      while (k < from.size() && !peer(from[(after_ + k) % from.size()]).has_arrival()) ++k;
      return k;
    };
    wait(held, from, "waiting for", within, true, [&](const detail::peer&) { return next() < from.size(); });
    const std::size_t place = (after_ + next()) % from.size();
    after_ = place + 1;
    engine_.wake();
    return peer(from[place]).take_arrival();
  }
  arrival receive(std::size_t from, bounded::instant within = forever) {
    return receive_from_any({&from, 1}, within);
  }

  [[nodiscard]] transport_counters counters() {
    const std::scoped_lock held(engine_.mutex);
    transport_counters all{engine_.path_counters(), engine_.foreign(), {}};
    for (const detail::peer& each : engine_.peers)
      all.peers.push_back({each.sender().counters(), each.receiver().counters(), each.sender().round() + 1,
                           each.sender().rate().bits()});
    return all;
  }

 private:
  using lock = std::unique_lock<std::mutex>;

  static const transport_options& checked(const transport_options& options, const open_sockets& here,
                                          std::span<const rank_addresses> all) {
    std::vector<std::size_t> ranks = {options.rank};
    for (const peer_options& each : options.peers) ranks.push_back(each.rank);
    std::ranges::sort(ranks);
    if (options.ranks > 65'536 || all.size() != options.ranks || ranks.back() >= options.ranks ||
        std::ranges::adjacent_find(ranks) != ranks.end()) {
      throw std::invalid_argument("rank " + std::to_string(options.rank) + " with peers " +
                                  options.names(std::span(ranks)) + ": each is one of " +
                                  std::to_string(options.ranks) + " ranks, and once, and has one of " +
                                  std::to_string(all.size()) + " addresses");
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

  [[nodiscard]] std::size_t place_of(std::size_t rank) const {
    const auto& peers = engine_.options.peers;
    const auto found = std::ranges::find(peers, rank, &peer_options::rank);
    if (found == peers.end())
      throw std::logic_error("rank " + std::to_string(this->rank()) + " does not talk to " +
                             std::to_string(rank));
    return static_cast<std::size_t>(found - peers.begin());
  }
  detail::peer& peer(std::size_t rank) { return engine_.peers[place_of(rank)]; }

  // Whether each of them is done or lost, or one is wrong; or one is lost, if nothing else is to be waited for then.
  template <class IsDone>
  bool is_settled(std::span<const std::size_t> ranks, bool ends_at_loss, IsDone is_done) {
    bool are_all = true;
    for (const std::size_t rank : ranks) {
      const detail::peer& each = peer(rank);
      if (is_done(each)) continue;
      if (each.at() == detail::peer::presence::wrong || (ends_at_loss && !each.is_here())) return true;
      are_all = are_all && !each.is_here();
    }
    return are_all;
  }
  // Sleeps until then. Who is lost meanwhile is what this ends with.
  template <class IsDone>
  void wait(lock& held, std::span<const std::size_t> ranks, const char* doing, bounded::instant within,
            bool ends_at_loss, IsDone is_done) {
    const auto settled = [&] { return engine_.failure || is_settled(ranks, ends_at_loss, is_done); };
    bool is_in_time = settled();
    if (!is_in_time) {
      for (const std::size_t rank : ranks) peer(rank).set_awaited(true);
      engine_.is_waited_for = settled;
      engine_.wake();
      if (within == forever) {
        engine_.settled.wait(held, settled);
        is_in_time = true;
      } else {
        is_in_time = engine_.settled.wait_for(held, within, settled);
      }
      engine_.is_waited_for = nullptr;
      for (const std::size_t rank : ranks) peer(rank).set_awaited(false);
    }
    if (engine_.failure) std::rethrow_exception(engine_.failure);
    std::vector<std::size_t> lost;
    std::string why;
    for (const std::size_t rank : ranks) {
      const detail::peer& each = peer(rank);
      if (is_done(each) || (each.is_here() && is_in_time)) continue;
      if (each.at() == detail::peer::presence::wrong) throw error(each.why());
      lost.push_back(rank);
      if (!each.is_here()) why = each.why();
    }
    if (lost.empty()) return;
    if (why.empty()) {
      const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(within);
      why = "not done within " + std::to_string(ms.count()) + " ms";
    }
    throw peers_lost(why + " while " + doing + " " + engine_.options.names(lost), lost);
  }
  void wait_sent(lock& held, std::span<const std::size_t> to, bounded::instant within) {
    wait(held, to, "sending to", within, false, [](const detail::peer& each) { return !each.is_sending(); });
  }

  detail::engine engine_;
  std::size_t after_ = 0;  // where receive_from_any() looks first
};

}  // namespace lamina::inline LAMINA_ABI::udp
