// SPDX-License-Identifier: MIT
#include "messages/udp/meeting.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

namespace lab {
namespace {

namespace bounded = lamina::bounded;
using clock = std::chrono::steady_clock;

// A HELLO is sent at once: who has not said it by then may have to make room.
constexpr std::chrono::milliseconds shortest_stay{250};
constexpr std::size_t hello_bytes = bounded::control_header_bytes + 40;

descriptor stream_socket(const endpoint& of) {
  descriptor made(
      ::socket(of.is_v6 != 0 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made.is_open()) throw_system_error("a TCP socket");
  return made;
}

std::array<std::byte, hello_bytes> hello_of(const meeting_options& options) {
  bounded::control_writer writer(options.secret, hello_bytes);
  const auto written = bounded::write_hello(writer, options.hello);
  std::array<std::byte, hello_bytes> bytes{};
  std::ranges::copy(written, bytes.begin());
  return bytes;
}

// HELLO of somebody who knows the secret; none: what came is something else.
std::optional<bounded::hello_body> read_hello(std::span<const std::byte> bytes, std::uint64_t secret) {
  bounded::control_header header;
  std::memcpy(&header, bytes.data(), sizeof header);
  bounded::keyed_check check(secret);
  const auto body = bytes.subspan(sizeof header);
  if (header.version != bounded::control_version || header.type != bounded::control_type::hello ||
      header.body_bytes != body.size() ||
      header.check != check.of({bytes.first(offsetof(bounded::control_header, check)), body})) {
    return std::nullopt;
  }
  std::error_code error;
  const bounded::hello_body hello = bounded::read_hello(body, check, error);
  if (error) return std::nullopt;
  return hello;
}

void check_alike(const bounded::hello_body& mine, const bounded::hello_body& theirs,
                 const std::string& name) {
  const auto compare = [&](auto here, auto there, const std::string& what) {
    if (here != there) {
      throw link_error(name + " was started with another " + what + ": " + std::to_string(there) +
                       " there, " + std::to_string(here) + " here");
    }
  };
  compare(mine.ranks, theirs.ranks, "number of ranks");
  compare(mine.mtu, theirs.mtu, "--mtu");
  compare(mine.fingerprint, theirs.fingerprint, "model (fingerprint of its layout)");
  compare(mine.element_type, theirs.element_type, "element type");
  compare(mine.payload_type, theirs.payload_type, "--payload");
  compare(mine.chunk_elements, theirs.chunk_elements, "number of elements of a chunk");
}

// One meeting: connections come, say who they are, and take their place.
class round_table {
 public:
  round_table(const listener& here, std::span<const std::size_t> peers, std::span<const endpoint> listeners,
              const meeting_options& options)
      : here_(here), peers_(peers), options_(options), hello_(hello_of(options)), seats_(peers.size()) {
    for (const std::size_t peer : peers) {
      if (peer < options.rank) call(peer, listeners[peer]);
    }
  }

  std::vector<descriptor> operator()() {
    const auto end = clock::now() + options_.timeout;
    while (!missing().empty()) {
      if (clock::now() >= end) lose();
      wait();
      std::erase_if(guests_, [&](guest& each) { return !listen_to(each); });
    }
    return std::move(seats_);
  }

 private:
  struct guest {
    descriptor connection;
    std::optional<std::size_t> called;  // by this rank
    bool is_greeted = false;            // has our HELLO
    clock::time_point since = clock::now();
    std::array<std::byte, hello_bytes> bytes{};
    std::size_t filled = 0;
    short ready = 0;
  };

  void call(std::size_t peer, const endpoint& at) {
    guest& made = guests_.emplace_back();
    made.connection = stream_socket(at);
    made.called = peer;
    endpoint local = here_.local();
    local.port = 0;
    const socket_address from(local);
    const socket_address to(at);
    const int number = made.connection.get();
    if (bind(number, from.get(), from.length) != 0 ||
        (connect(number, to.get(), to.length) != 0 && errno != EINPROGRESS)) {
      throw_system_error("cannot connect to " + options_.name_of(peer) + " at " + text_of(at));
    }
  }

  std::vector<std::size_t> missing() const {
    std::vector<std::size_t> ranks;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (!seats_[i].is_open()) ranks.push_back(peers_[i]);
    }
    return ranks;
  }

  [[noreturn]] void lose() const {
    const std::vector<std::size_t> ranks = missing();
    throw peers_lost(
        "no connection of control within " +
            std::to_string(std::chrono::duration_cast<std::chrono::seconds>(options_.timeout).count()) +
            " s with " + names_of(ranks, options_.name_of),
        ranks);
  }

  void wait() {
    if (is_full()) make_room();
    std::vector<pollfd> ready = {{here_.descriptor_number(), static_cast<short>(is_full() ? 0 : POLLIN), 0}};
    for (const guest& each : guests_) {
      const bool must_greet = each.called && !each.is_greeted;
      ready.push_back({each.connection.get(), static_cast<short>(must_greet ? POLLOUT : POLLIN), 0});
    }
    if (poll(ready.data(), ready.size(), 50) < 0 && errno != EINTR) throw_system_error("poll");
    for (std::size_t i = 0; i < guests_.size(); ++i) guests_[i].ready = ready[i + 1].revents;
    if (ready[0].revents != 0) accept_all();
  }

  void accept_all() {
    while (!is_full()) {
      descriptor come(accept4(here_.descriptor_number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!come.is_open()) {
        // It would go on waiting to be accepted, and every poll would return at once.
        const bool lacks_room = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
        if (lacks_room) throw_system_error("cannot accept a connection of control");
        return;
      }
      guests_.emplace_back().connection = std::move(come);
    }
  }

  bool is_full() const { return guests_.size() >= 2 * std::size_t{options_.hello.ranks}; }

  // The oldest that says nothing leaves. Whoever has just come has not been listened to yet: a crowd must not push it out.
  void make_room() {
    const auto silent = std::ranges::find_if(
        guests_, [](const guest& each) { return !each.called && clock::now() > each.since + shortest_stay; });
    if (silent != guests_.end()) guests_.erase(silent);
  }

  // Whether it is still to be listened to.
  bool listen_to(guest& who) {
    if (!who.called && clock::now() > who.since + options_.hello_timeout) return false;
    if (who.ready == 0) return true;
    if (who.called && !who.is_greeted) greet_called(who);
    const ssize_t taken =
        recv(who.connection.get(), who.bytes.data() + who.filled, hello_bytes - who.filled, 0);
    if (taken < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return true;
    if (taken <= 0) {
      if (who.called) {
        throw link_error(options_.name_of(*who.called) +
                         " closed the connection of control before it said HELLO");
      }
      return false;
    }
    who.filled += static_cast<std::size_t>(taken);
    return who.filled < hello_bytes || !seat(who);
  }

  void greet_called(guest& who) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(who.connection.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) throw_system_error("cannot connect to " + options_.name_of(*who.called), error);
    greet(who, *who.called);
  }

  void greet(guest& who, std::size_t rank) {
    // The buffer of a new connection has room for it.
    if (send(who.connection.get(), hello_.data(), hello_.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(hello_.size())) {
      throw_system_error("HELLO to " + options_.name_of(rank));
    }
    who.is_greeted = true;
  }

  // Whether it is done with: in its place, or nobody that was waited for.
  bool seat(guest& who) {
    const auto hello = read_hello(who.bytes, options_.secret);
    if (!hello) {
      if (who.called)
        throw link_error(options_.name_of(*who.called) + " does not know the secret of this run");
      return true;
    }
    const std::size_t rank = hello->rank;
    const auto place = std::ranges::find(peers_, rank);
    const bool is_expected = who.called ? rank == *who.called : place != peers_.end() && rank > options_.rank;
    if (!is_expected || place == peers_.end()) {
      throw link_error("rank " + std::to_string(rank) + " says HELLO where another belongs");
    }
    descriptor& seat = seats_[static_cast<std::size_t>(place - peers_.begin())];
    if (seat.is_open()) return true;        // one connection a pair
    if (!who.is_greeted) greet(who, rank);  // before the check: both say what differs
    check_alike(options_.hello, *hello, options_.name_of(rank));
    seat = std::move(who.connection);
    return true;
  }

  const listener& here_;
  std::span<const std::size_t> peers_;
  const meeting_options& options_;
  std::array<std::byte, hello_bytes> hello_;
  std::vector<guest> guests_;
  std::vector<descriptor> seats_;
};

}  // namespace

listener::listener(const endpoint& local) : socket_(stream_socket(local)) {
  socket_address address(local);
  if (bind(socket_.get(), address.get(), address.length) != 0 || listen(socket_.get(), SOMAXCONN) != 0) {
    throw_system_error("TCP on the address " + text_of(local));
  }
  address.length = sizeof(sockaddr_storage);
  if (getsockname(socket_.get(), address.get(), &address.length) != 0) throw_system_error("getsockname");
  local_ = address.to_endpoint();
}

std::vector<descriptor> meet(const listener& here, std::span<const std::size_t> peers,
                             std::span<const endpoint> listeners, const meeting_options& options) {
  return round_table(here, peers, listeners, options)();
}

}  // namespace lab
