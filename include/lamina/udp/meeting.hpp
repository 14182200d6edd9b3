// SPDX-License-Identifier: MIT
#pragma once

/// What a rank opens, what ranks agree to, and how they meet: a connection of control a pair. Read after control.hpp, before peer.hpp.

#include <poll.h>
#include <sys/random.h>

#include <functional>
#include <list>

#include "lamina/bounded/receiver.hpp"
#include "lamina/udp/control.hpp"

namespace lamina::inline LAMINA_ABI::udp {

/// What one rank opens before it meets the others: a socket of packets a path, and a port where it listens for control.
struct open_sockets {
  /// At these addresses, whose ports may be the system's choice. Each path loses other packets. Throws error, naming the address.
  explicit open_sockets(const rank_addresses& at, socket_options options = {})
      : listener(::socket(at.control.is_v6 != 0 ? AF_INET6 : AF_INET,
                          SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    if (!listener.is_open()) detail::throw_system_error("a TCP socket");
    detail::set_option(listener.get(), SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
    addresses = at;
    addresses.control = detail::bind_to(listener.get(), at.control, "TCP");
    if (::listen(listener.get(), SOMAXCONN) != 0)
      detail::throw_system_error("TCP on the address " + text_of(at.control));
    for (std::uint32_t i = 0; i < at.paths; ++i) {
      paths.emplace_back(at.data.at(i), options);
      addresses.data.at(i) = paths.back().local();
      options.inject_seed += std::uint64_t{1} << 40U;
    }
  }

  rank_addresses addresses;  ///< with the ports, for the other ranks
  std::vector<packet_socket> paths;
  detail::descriptor listener;
};

/// What this rank and one other agree to; the other says the same from its end.
struct peer_options {
  std::size_t rank = 0;
  bounded::chunk_grid sends;                  ///< how frames to it are cut
  bounded::chunk_grid takes;                  ///< how frames from it are cut
  frame_kind kind = frame_kind::gradients;    ///< of frames from it
  std::uint32_t most_bound_ppm = 0;           ///< what it may lose of them at most, in parts per million
  std::chrono::milliseconds timeout{10'000};  ///< of silence, after which it is lost if it is waited for
};

struct transport_options {
  std::size_t rank = 0;
  std::size_t ranks = 0;                 ///< of the run, at most 65,536
  std::vector<peer_options> peers = {};  ///< those that this rank talks to
  std::uint64_t secret = 0;              ///< of this run only, and the same on all ranks: draw_secret()
  std::size_t mtu = 1500;                ///< of the path, in bytes; the grids were made for it
  bounded::stop_policy stop = bounded::stop_policy::eager;
  bool has_classes = true;                            ///< packets have their class and precedence (DSCP)
  bounded::rate_options rate = {};                    ///< of each rank's link, and of those that send into it
  std::chrono::milliseconds meeting_timeout{30'000};  ///< in which all must have met
  std::function<std::string(std::size_t)> name_of = {};  ///< of a rank, for errors; empty: "rank 2"

  [[nodiscard]] std::string name(std::size_t which) const {
    return name_of ? name_of(which) : "rank " + std::to_string(which);
  }
  /// "worker 0, worker 1 and worker 2".
  [[nodiscard]] std::string names(std::span<const std::size_t> which) const {
    std::string text;
    for (std::size_t i = 0; i < which.size(); ++i)
      text += (i == 0 ? "" : i + 1 < which.size() ? ", " : " and ") + name(which[i]);
    return text;
  }
};

/// 64 bits of the system's, for one rank to draw and to tell the others. Throws error.
inline std::uint64_t draw_secret() {
  std::uint64_t secret = 0;
  if (::getrandom(&secret, sizeof secret, 0) != sizeof secret) detail::throw_system_error("getrandom");
  return secret;
}

namespace detail {

/// One meeting: a rank calls the peers below it, and those above it call. Connections come, both ends say HELLO, and each takes its place.
/// A caller that does not prove the secret is not listened to, and costs nothing but a place among the 2 × ranks that may wait; one that
/// proves it and was started otherwise ends the meeting.
class meeting {
 public:
  meeting(int listener, std::span<const rank_addresses> all, const transport_options& options)
      : listener_(listener), all_(all), options_(options), seats_(options.peers.size()) {}

  /// The connections in the order of the peers, which do not block. Throws error, naming the rank that cannot be reached or was started
  /// for another run, and peers_lost, naming those that did not come in time.
  std::vector<descriptor> run() {
    const auto end = clock_now() + options_.meeting_timeout;
    for (;;) {
      std::vector<std::size_t> missing;
      for (std::size_t i = 0; i < seats_.size(); ++i)
        if (!seats_[i].is_open()) missing.push_back(options_.peers[i].rank);
      if (missing.empty()) return std::move(seats_);
      if (clock_now() >= end) {
        throw peers_lost("no connection of control within " +
                             std::to_string(options_.meeting_timeout.count()) + " ms with " +
                             options_.names(missing),
                         missing);
      }
      call_missing();
      wait();
      std::erase_if(guests_, [&](guest& each) { return !listen_to(each); });
    }
  }

 private:
  // A HELLO is sent at once: who has not said it by then may have to leave.
  static constexpr std::chrono::milliseconds shortest_stay{250};
  static constexpr std::chrono::milliseconds longest_stay{5'000};
  // Between calls to ranks that do not listen yet.
  static constexpr std::chrono::milliseconds recall{50};

  struct guest {
    guest(descriptor connection, std::uint64_t secret, std::optional<std::size_t> place)
        : channel(std::move(connection), secret, nothing), called(place) {}

    // It may say HELLO, which is of no grid.
    inline static const bounded::control_limits nothing{
        bounded::chunk_grid::of<float>(layout({}), payload_type::as_is, 8)};
    control_channel channel;
    std::optional<std::size_t> called;  // the peer's place, if this rank has called
    bool is_greeted = false;            // has our HELLO
    bounded::instant since = clock_now();
    short ready = 0;
  };

  [[nodiscard]] std::string name_at(std::size_t place) const {
    return options_.name(options_.peers[place].rank);
  }

  void call_missing() {
    if (clock_now() < next_call_) return;
    next_call_ = clock_now() + recall;
    for (std::size_t i = 0; i < seats_.size(); ++i) {
      const std::size_t rank = options_.peers[i].rank;
      const bool is_called =
          std::ranges::any_of(guests_, [&](const guest& each) { return each.called == i; });
      if (rank >= options_.rank || seats_[i].is_open() || is_called) continue;
      endpoint local = all_[options_.rank].control;
      local.port = 0;
      descriptor made(
          ::socket(local.is_v6 != 0 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (!made.is_open()) throw_system_error("a TCP socket");
      bind_to(made.get(), local, "TCP");
      const socket_address to(all_[rank].control);
      if (::connect(made.get(), &to.is.any, to.length) == 0 || errno == EINPROGRESS) {
        guests_.emplace_back(std::move(made), options_.secret, i);
      } else if (errno != ECONNREFUSED) {
        throw_system_error("cannot connect to " + name_at(i) + " at " + text_of(all_[rank].control));
      }
    }
  }

  void wait() {
    // The oldest that says nothing leaves. Whoever has just come has not been listened to yet: a crowd must not push it out.
    if (is_full()) {
      const auto silent = std::ranges::find_if(guests_, [](const guest& each) {
        return !each.called && clock_now() > each.since + shortest_stay;
      });
      if (silent != guests_.end()) guests_.erase(silent);
    }
    std::vector<pollfd> ready = {{listener_, static_cast<short>(is_full() ? 0 : POLLIN), 0}};
    for (const guest& each : guests_) {
      const bool must_greet = each.called && !each.is_greeted;
      ready.push_back(
          {each.channel.descriptor_number(), static_cast<short>(must_greet ? POLLOUT : POLLIN), 0});
    }
    if (::poll(ready.data(), ready.size(), 50) < 0 && errno != EINTR) throw_system_error("poll");
    for (auto at = ready.begin() + 1; guest & each : guests_) each.ready = (at++)->revents;
    while (ready[0].revents != 0 && !is_full()) {
      descriptor come(::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!come.is_open()) {
        // It would go on waiting to be accepted, and every poll would return at once.
        const bool is_exhausted = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
        if (is_exhausted) throw_system_error("cannot accept a connection of control");
        break;
      }
      guests_.emplace_back(std::move(come), options_.secret, std::nullopt);
    }
  }
  [[nodiscard]] bool is_full() const { return guests_.size() >= 2 * options_.ranks; }

  // Whether it is still to be listened to.
  bool listen_to(guest& who) {
    if (!who.called && clock_now() > who.since + longest_stay) return false;
    if (who.ready == 0) return true;
    if (who.called && !who.is_greeted && !greet_called(who)) return false;
    const control_channel::arrival come = who.channel.read();
    if (come == control_channel::arrival::nothing) return true;
    if (come == control_channel::arrival::message) seat(who);
    if (come == control_channel::arrival::message || !who.called) return false;
    if (come == control_channel::arrival::refused)
      throw error(name_at(*who.called) + " does not know the secret of this run");
    throw error(name_at(*who.called) +
                " closed the connection of control before it said HELLO: is its secret another?");
  }
  // False: it does not listen yet, and is called again.
  bool greet_called(guest& who) {
    int number = 0;
    socklen_t length = sizeof number;
    ::getsockopt(who.channel.descriptor_number(), SOL_SOCKET, SO_ERROR, &number, &length);
    if (number == ECONNREFUSED) return false;
    if (number != 0) throw_system_error("cannot connect to " + name_at(*who.called), number);
    greet(who, *who.called);
    return true;
  }
  void greet(guest& who, std::size_t place) {
    bounded::control_writer writer(options_.secret, sizeof(bounded::hello_body));
    who.channel.put(writer.write(bounded::control_type::hello, 0, 0, hello_to(place)));
    if (!who.channel.write()) throw_system_error("HELLO to " + name_at(place));
    who.is_greeted = true;
  }

  // In its place, or nobody that was waited for.
  void seat(guest& who) {
    const bounded::control_message& come = who.channel.message();
    bounded::hello_body hello;
    if (come.header.type != bounded::control_type::hello || bounded::read_body(come.body, hello)) {
      if (who.called) throw error(name_at(*who.called) + " says no HELLO of this run");
      return;
    }
    const auto found = std::ranges::find(options_.peers, std::size_t{hello.rank}, &peer_options::rank);
    const auto place = static_cast<std::size_t>(found - options_.peers.begin());
    const bool is_expected = who.called ? place == *who.called : hello.rank > options_.rank;
    if (found == options_.peers.end() || !is_expected)
      throw error("rank " + std::to_string(hello.rank) + " says HELLO where another belongs");
    if (seats_[place].is_open()) return;     // one connection a pair
    if (!who.is_greeted) greet(who, place);  // before the comparison: both say what differs
    compare(hello_to(place), hello, name_at(place));
    seats_[place] = who.channel.take_connection();
  }
  // Of the frames that go to the lower of both ranks, so that both say the same.
  [[nodiscard]] bounded::hello_body hello_to(std::size_t place) const {
    const peer_options& peer = options_.peers[place];
    const bounded::chunk_grid& grid = options_.rank < peer.rank ? peer.takes : peer.sends;
    return {.rank = static_cast<std::uint32_t>(options_.rank),
            .ranks = static_cast<std::uint32_t>(options_.ranks),
            .element_type = static_cast<std::uint8_t>(grid.element_bytes() == sizeof(float) ? 1 : 2),
            .payload_type = static_cast<std::uint8_t>(grid.type()),
            .fingerprint = grid.fragments().fingerprint(),
            .chunk_elements = static_cast<std::uint32_t>(grid.chunk_elements()),
            .mtu = static_cast<std::uint32_t>(options_.mtu)};
  }
  static void compare(const bounded::hello_body& mine, const bounded::hello_body& theirs,
                      const std::string& name) {
    const auto same = [&](auto here, auto there, const char* what) {
      if (here != there)
        throw error(name + " was started with another " + what + ": " + std::to_string(there) + " there, " +
                    std::to_string(here) + " here");
    };
    same(mine.protocol, theirs.protocol, "version of the protocol");
    same(mine.ranks, theirs.ranks, "number of ranks");
    same(mine.mtu, theirs.mtu, "mtu");
    same(mine.fingerprint, theirs.fingerprint, "model (fingerprint of its layout)");
    same(mine.element_type, theirs.element_type, "element type");
    same(mine.payload_type, theirs.payload_type, "payload type");
    same(mine.chunk_elements, theirs.chunk_elements, "number of elements of a chunk");
  }

  int listener_;
  std::span<const rank_addresses> all_;
  const transport_options& options_;
  std::list<guest> guests_;
  std::vector<descriptor> seats_;
  bounded::instant next_call_{};
};

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI::udp
