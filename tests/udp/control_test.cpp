// SPDX-License-Identifier: MIT
// Control messages over a stream, and the meeting before it: what is taken, and what is refused.
#include "lamina/udp/control.hpp"

#include <sys/resource.h>

#include <exception>

#include "catch.hpp"
#include "ranks.hpp"

namespace lamina_test::control_test {

namespace {

using Catch::Matchers::Contains;
using arrival = control_channel::arrival;
using bounded::control_type;
using lamina::errc;

/// Both ends of a connection.
struct pair_of_channels {
  pair_of_channels() {
    std::array<int, 2> ends{};
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()) == 0);
    const bounded::control_limits limits(grid_of({}));
    here.emplace(descriptor(ends[0]), run_secret, limits);
    there.emplace(descriptor(ends[1]), run_secret, limits);
  }
  void put_raw(std::span<const std::byte> bytes) {
    REQUIRE(::send(here->descriptor_number(), bytes.data(), bytes.size(), 0) ==
            static_cast<ssize_t>(bytes.size()));
  }
  // Of the other end, which writes on while this one reads.
  arrival read() {
    for (int empty = 0; empty < 3;) {
      REQUIRE(here->write());
      const arrival come = there->read();
      if (come != arrival::nothing) return come;
      empty += here->has_unsent() ? 0 : 1;
    }
    return arrival::nothing;
  }
  std::optional<control_channel> here;
  std::optional<control_channel> there;
};

std::vector<std::byte> numbered(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

}  // namespace

TEST_CASE("control_channel: messages of any length arrive in order, whole") {
  pair_of_channels link;
  bounded::control_writer writer(run_secret, bounded::most_abort_bytes);
  for (const std::size_t length : {0U, 1U, 23U, 24U, 1020U}) {
    const std::vector<std::byte> body = numbered(length);
    writer.clear();
    writer.put(body);
    link.here->put(writer.finish(control_type::abort, 3, 0));
    link.here->put(writer.write(control_type::tick, 0, 0));
    REQUIRE(link.read() == arrival::message);
    CHECK(std::ranges::equal(link.there->message().body, body));
    REQUIRE(link.read() == arrival::message);
    CHECK(link.there->message().header.type == control_type::tick);
    CHECK_FALSE(link.here->has_unsent());
  }
  CHECK(link.read() == arrival::nothing);
  link.here->close();
  CHECK(link.there->read() == arrival::closed);
}

TEST_CASE("control_channel: a message that comes byte by byte is whole at its last") {
  pair_of_channels link;
  bounded::control_writer writer(run_secret, 4);
  const auto probe = writer.write(control_type::probe, 3, 1, std::uint32_t{77});
  for (std::size_t i = 0; i < probe.size(); ++i) {
    link.put_raw(probe.subspan(i, 1));
    CHECK(link.there->read() == (i + 1 < probe.size() ? arrival::nothing : arrival::message));
  }
  CHECK(link.there->message().header.round == 1);
}

TEST_CASE("control_channel: what is no message is refused by name, once and for all") {
  pair_of_channels link;
  const auto refused = [&](std::error_code why) {
    CHECK(link.read() == arrival::refused);
    CHECK(link.there->failure() == why);
    CHECK(link.read() == arrival::refused);
  };
  SECTION("longer than its type may be") {
    const bounded::control_header header{.body_bytes = 5, .type = control_type::probe};
    link.put_raw(std::as_bytes(std::span(&header, 1)));
    refused(errc::wrong_length);
  }
  SECTION("with another secret") {
    bounded::control_writer writer(run_secret + 1, 64);
    link.put_raw(writer.finish(control_type::bye, 0, 0));
    refused(errc::bad_check);
  }
}

namespace {

/// A server and a worker that have not met.
struct two_ranks {
  std::size_t meet(std::size_t rank, const udp::transport_options& options) const {
    return meet_all(rank == 0 ? server : worker, all, options).size();
  }
  std::size_t meet(std::size_t rank) const { return meet(rank, options_of(given, rank, 2)); }
  std::future<std::size_t> server_meets() const {
    return std::async(std::launch::async, [this] { return meet(0); });
  }

  ranks_given given;
  udp::open_sockets server = start_rank(given, 0);
  udp::open_sockets worker = start_rank(given, 1);
  std::vector<udp::rank_addresses> all = {server.addresses, worker.addresses};
};

/// Someone who calls a listener.
descriptor call(const endpoint& at) {
  descriptor made(socket(AF_INET, SOCK_STREAM, 0));
  const udp::detail::socket_address to(at);
  REQUIRE(connect(made.get(), &to.is.any, to.length) == 0);
  return made;
}
void say(const descriptor& to, std::span<const std::byte> bytes) {
  static_cast<void>(::send(to.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
}
bool is_closed_within(const descriptor& at, int milliseconds) {
  pollfd ready{at.get(), POLLIN, 0};
  std::byte one{};
  return poll(&ready, 1, milliseconds) == 1 && recv(at.get(), &one, 1, 0) <= 0;
}
std::vector<std::byte> hello_bytes(const bounded::hello_body& hello, std::uint64_t secret) {
  bounded::control_writer writer(secret, 64);
  const auto bytes = writer.write(control_type::hello, 0, 0, hello);
  return {bytes.begin(), bytes.end()};
}

}  // namespace

TEST_CASE("meeting: who does not prove the secret is sent away, and the others still meet") {
  const two_ranks ranks;
  auto met = ranks.server_meets();

  const descriptor noise = call(ranks.server.addresses.control);
  say(noise, numbered(64));
  const descriptor stranger = call(ranks.server.addresses.control);
  say(stranger, hello_bytes(bounded::hello_body{.rank = 1, .ranks = 2}, run_secret + 1));
  const descriptor silent = call(ranks.server.addresses.control);
  CHECK(is_closed_within(noise, 2000));
  CHECK(is_closed_within(stranger, 2000));
  CHECK(is_closed_within(silent, 8000));
  CHECK(ranks.meet(1) == 1);
  CHECK(met.get() == 1);
}

TEST_CASE("meeting: connections that say nothing are not hoarded, and keep nobody out") {
  const two_ranks ranks;
  auto met = ranks.server_meets();
  std::vector<descriptor> silent;
  for (int i = 0; i < 6; ++i) silent.push_back(call(ranks.server.addresses.control));
  CHECK(is_closed_within(silent[0], 2000));  // two ranks: four may wait
  CHECK(ranks.meet(1) == 1);
  CHECK(met.get() == 1);
}

TEST_CASE("meeting: a crowd that comes behind a rank does not push it out before it is heard") {
  const two_ranks ranks;
  auto other = std::async(std::launch::async, [&] { return ranks.meet(1); });
  std::this_thread::sleep_for(200ms);  // it has called, and waits for the server to listen
  std::vector<descriptor> crowd;
  for (int i = 0; i < 8; ++i) crowd.push_back(call(ranks.server.addresses.control));
  CHECK(ranks.meet(0) == 1);
  CHECK(other.get() == 1);
}

TEST_CASE("control: where the system knows of it, TCP's least timeout is short") {
  const descriptor here(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  constexpr int least_timeout_us = 45;  // TCP_RTO_MIN_US, which older headers do not name
  int microseconds = 0;
  socklen_t length = sizeof microseconds;
  if (getsockopt(here.get(), IPPROTO_TCP, least_timeout_us, &microseconds, &length) != 0) {
    WARN("skipped: this system has no TCP_RTO_MIN_US");
    return;
  }
  REQUIRE(microseconds >= 100'000);
  udp::detail::set_control_options(here.get(), 1000);
  length = sizeof microseconds;
  REQUIRE(getsockopt(here.get(), IPPROTO_TCP, least_timeout_us, &microseconds, &length) == 0);
  CHECK(microseconds <= 40'000);
}

TEST_CASE("meeting: without a file descriptor left for who calls, it says so") {
  const two_ranks ranks;
  const descriptor caller = call(ranks.server.addresses.control);
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const descriptor next(dup(caller.get()));
  const rlimit none{static_cast<rlim_t>(next.get()) + 1, before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  std::exception_ptr thrown;
  try {
    (void)ranks.meet(0);
  } catch (...) {
    thrown = std::current_exception();
  }
  // Before the exception is looked at, for which a sanitizer opens a pipe.
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(thrown);
  CHECK_THROWS_WITH(std::rethrow_exception(thrown), Contains("cannot accept a connection of control"));
}

TEST_CASE("meeting: both ends name what differs") {
  const two_ranks ranks;
  udp::transport_options other = options_of(ranks.given, 1, 2);
  other.mtu = 1400;
  auto met = ranks.server_meets();
  CHECK_THROWS_WITH(ranks.meet(1, other),
                    Contains("the server was started with another mtu: 1500 there, 1400 here"));
  CHECK_THROWS_WITH(met.get(), Contains("worker 0 was started with another mtu: 1400 there, 1500 here"));
}

TEST_CASE("meeting: who does not come is named") {
  const ranks_given given;
  const udp::open_sockets server = start_rank(given, 0);
  const std::vector<udp::rank_addresses> all(3, server.addresses);
  udp::transport_options options = options_of(given, 0, 3);
  options.meeting_timeout = 100ms;
  CHECK_THROWS_WITH(meet_all(server, all, options), Contains("worker 0 and worker 1"));
}

TEST_CASE("meeting: a rank that calls before the other listens calls again") {
  const ranks_given given;
  std::vector<udp::rank_addresses> all;
  for (const std::size_t rank : {0U, 1U}) all.push_back(start_rank(given, rank).addresses);  // free ports
  auto met = std::async(std::launch::async, [&] {
    const udp::open_sockets worker(all[1]);
    return meet_all(worker, all, options_of(given, 1, 2)).size();
  });
  std::this_thread::sleep_for(200ms);
  const udp::open_sockets server(all[0]);
  CHECK(meet_all(server, all, options_of(given, 0, 2)).size() == 1);
  CHECK(met.get() == 1);
}

TEST_CASE("meeting: who has another secret is told so") {
  const two_ranks ranks;
  udp::transport_options mine = options_of(ranks.given, 0, 2);
  mine.meeting_timeout = 1s;
  auto met = std::async(std::launch::async, [&] { return ranks.meet(0, mine); });
  udp::transport_options other = options_of(ranks.given, 1, 2);
  other.secret = run_secret + 1;
  CHECK_THROWS_WITH(ranks.meet(1, other), Contains("the server") && Contains("secret"));
  CHECK_THROWS_WITH(met.get(), "no connection of control within 1000 ms with worker 0");
}

}  // namespace lamina_test::control_test
