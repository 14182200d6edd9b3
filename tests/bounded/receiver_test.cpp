// SPDX-License-Identifier: MIT
// Every state of a receiver and every event, and its times.
#include "lamina/bounded/receiver.hpp"

#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::receiver_test {

using bounded::control_type;

namespace {

using bytes = std::vector<std::byte>;

// Two fragments of ten chunks; one of each may be missing.
const cut_frame& some_frame() {
  static const cut_frame frame({80, 80}, {.seed = 95, .bound_ppm = 100'000});
  return frame;
}

// What a sender sends in two transfers: BEGIN, the packets of the first round and PROBE.
struct recording {
  struct transfer {
    bytes begin, probe;
    std::vector<bytes> packets;
  };
  recording() {
    frame = some_frame().made.frame().to_bytes();
    simulated_link link(some_frame().grid, {});
    for (transfer* each : {&first, &second}) {
      link.is_dropped = [&](const bounded::outgoing_packet& packet) {
        each->packets.push_back(joined(packet));
        return false;
      };
      bounded::bounded_sender& sender = link.sender;
      sender.begin(some_frame().chunks);
      each->begin = copy_of(sender.poll_control(link.now));
      link.up.send(0, {each->begin}, link.now);
      link.run([&] { return sender.state() == sender_state::done; });
      each->probe = message(control_type::probe, sender.transfer(), 0,
                            static_cast<std::uint32_t>(each->packets.size()));
      link.receiver.release(link.now);
    }
  }
  transfer first, second;
  bytes frame;
};
const recording& recorded() {
  static const recording made;
  return made;
}

class tried_receiver {
 public:
  explicit tried_receiver(stop_policy stop = stop_policy::on_probe)
      : receiver(some_frame().grid,
                 {.rank = 0, .sender = 2, .secret = test_secret, .most_bound_ppm = 100'000, .stop = stop}) {}
  std::error_code give(const bytes& all) { return receiver.on_control(read(all), now); }
  packet_fate packet(std::size_t index, const recording::transfer& of = recorded().first) {
    return receiver.on_datagram(of.packets[index], now);
  }
  // The types of all it sends now.
  std::vector<control_type> polled() {
    std::vector<control_type> types;
    for (auto all = receiver.poll_control(now); !all.empty(); all = receiver.poll_control(now)) {
      last = read(all).header;
      types.push_back(last.type);
    }
    return types;
  }
  bounded::control_header last;
  bounded::bounded_receiver receiver;
  instant now = 1s;

 private:
  static bounded::control_message read(std::span<const std::byte> all) {
    std::error_code error;
    bounded::keyed_check check(test_secret);
    const auto message = bounded::read_control(all, bounded::control_limits(some_frame().grid), check, error);
    REQUIRE_FALSE(error);
    return message;
  }
};

enum class at { waiting, open, frozen, frozen_held, released, failed };
constexpr std::array all_states = {at::waiting,     at::open,     at::frozen,
                                   at::frozen_held, at::released, at::failed};

tried_receiver receiver_at(at where) {
  tried_receiver tried;
  if (where == at::waiting) return tried;
  REQUIRE_FALSE(tried.give(recorded().first.begin));
  tried.polled();
  if (where == at::failed) {
    CHECK(tried.give(recorded().second.begin) == errc::unexpected_message);
    tried.polled();
    return tried;
  }
  tried.packet(0);
  if (where == at::open) return tried;
  for (std::size_t k = 1; k < 20; ++k) tried.packet(k);
  tried.polled();
  if (where == at::frozen_held) REQUIRE_FALSE(tried.give(recorded().second.begin));
  if (where == at::released) REQUIRE_FALSE(tried.receiver.release(tried.now));
  return tried;
}

constexpr receiver_state waiting = receiver_state::waiting, open = receiver_state::open,
                         frozen = receiver_state::frozen, failed = receiver_state::failed;
constexpr errc unexpected = errc::unexpected_message;
using types = std::vector<control_type>;

struct outcome {
  receiver_state next;
  std::optional<errc> error = std::nullopt;
  types sent = {};
};

void check_control(const std::string& event, const bytes& message, const std::array<outcome, 6>& expected) {
  for (std::size_t k = 0; k < all_states.size(); ++k) {
    auto tried = receiver_at(all_states[k]);
    const std::error_code error = tried.give(message);
    INFO("event " << event << ", state " << k << ": " << error.message());
    CHECK(tried.receiver.state() == expected[k].next);
    CHECK(error == (expected[k].error ? make_error_code(*expected[k].error) : std::error_code()));
    CHECK(tried.polled() == expected[k].sent);
    if (tried.receiver.state() != frozen) continue;
    CHECK(same_bits(tried.receiver.frame(), recorded().frame));
    if (!error) continue;
    // The frame outlives its connection; nothing is taken any more, and the error comes with its release.
    CHECK(tried.give(recorded().second.begin) == error);
    CHECK(tried.receiver.release(tried.now) == error);
    CHECK(tried.receiver.state() == failed);
  }
}

}  // namespace

TEST_CASE("states: a receiver and every message") {
  const types abort = {control_type::abort};
  const outcome refused = {failed, unexpected, abort};
  const outcome has_failed = {failed, unexpected, {}};
  const outcome stands = {frozen, unexpected, abort};  // until it is released
  // In order: waiting for the first, open, frozen, frozen with a BEGIN held, released after the first, failed.
  check_control("BEGIN of the first", recorded().first.begin,
                {{{open, {}, {control_type::ready}}, refused, stands, stands, refused, has_failed}});
  check_control("BEGIN of the next", recorded().second.begin,
                {{{open, {}, {control_type::ready}},
                  refused,
                  {frozen},
                  stands,
                  {open, {}, {control_type::ready}},
                  has_failed}});
  check_control("BEGIN of no transfer", message(control_type::begin, 0, 0),
                {{refused, refused, stands, stands, refused, has_failed}});
  check_control("BEGIN without a body", message(control_type::begin, 9, 0),
                {{{failed, errc::truncated, abort},
                  refused,
                  {frozen},
                  stands,
                  {failed, errc::truncated, abort},
                  has_failed}});
  // Not all of it has come, so that the answer waits.
  check_control("PROBE", recorded().first.probe,
                {{refused, {open}, {frozen}, {frozen}, {waiting}, has_failed}});
  check_control("PROBE of another transfer", recorded().second.probe,
                {{refused, refused, stands, stands, refused, has_failed}});
  check_control("PROBE of a later round", message(control_type::probe, 1, 1, bytes(4)),
                {{refused, refused, {frozen}, {frozen}, {waiting}, has_failed}});
  check_control("PROBE that is too short", message(control_type::probe, 1, 0, bytes(3)),
                {{refused, {failed, errc::truncated, abort}, {frozen}, {frozen}, {waiting}, has_failed}});
  check_control("ABORT", message(control_type::abort, 1, 0, bytes(4)),
                {{{waiting},
                  {failed, errc::aborted, abort},
                  {frozen},
                  {frozen, errc::aborted, abort},
                  {waiting},
                  has_failed}});
  for (const control_type type :
       {control_type::hello, control_type::ready, control_type::report, control_type::wanted,
        control_type::stop, control_type::ping, control_type::pong, control_type::bye}) {
    check_control("of no receiver", message(type, 1, 0),
                  {{refused, refused, stands, stands, refused, has_failed}});
  }
  check_control("TICK", message(control_type::tick, 0, 0),
                {{{waiting}, {open}, {frozen}, {frozen}, {waiting}, has_failed}});
}

TEST_CASE("states: a packet of no transfer that is open or frozen is stale") {
  const auto& [first, second, frame] = recorded();
  for (const at where : {at::waiting, at::released, at::failed}) {
    CHECK(receiver_at(where).packet(0, first) == packet_fate::stale);
    CHECK(receiver_at(where).packet(0, second) == packet_fate::stale);
  }
  for (const at where : {at::open, at::frozen, at::frozen_held})
    CHECK(receiver_at(where).packet(0, second) == packet_fate::stale);
}

TEST_CASE("states: the last packet that is needed freezes, eager or not") {
  for (const stop_policy stop : {stop_policy::eager, stop_policy::on_probe}) {
    tried_receiver tried(stop);
    REQUIRE_FALSE(tried.give(recorded().first.begin));
    CHECK(tried.polled() == types{control_type::ready});
    std::size_t needed = 0;
    while (tried.receiver.state() == open) tried.packet(needed++);
    // Two fragments of ten, of which the last of each may be missing: 0/10, 1/10 ... 8/10 of each.
    CHECK(needed == (stop == stop_policy::eager ? 18 : 20));
    CHECK(tried.polled() == types{control_type::stop});
    CHECK(tried.receiver.arrived().lost_chunks() == (stop == stop_policy::eager ? 2 : 0));
  }
}

TEST_CASE("states: release gives the next frame its place, and only then") {
  auto tried = receiver_at(at::frozen_held);
  CHECK(tried.polled().empty());
  CHECK_FALSE(tried.receiver.release(tried.now));
  CHECK(tried.receiver.state() == open);
  CHECK(tried.receiver.transfer() == 2);
  CHECK(tried.polled() == types{control_type::ready});
  CHECK_FALSE(tried.receiver.release(tried.now));  // nothing is frozen
  CHECK(tried.receiver.state() == open);
  CHECK(tried.packet(0, recorded().second) == packet_fate::placed);
  // What it held was no BEGIN at all.
  auto wrong = receiver_at(at::frozen);
  REQUIRE_FALSE(wrong.give(message(control_type::begin, 9, 0)));
  CHECK(wrong.receiver.release(wrong.now) == errc::truncated);
  CHECK(wrong.receiver.state() == failed);
}

TEST_CASE("states: a receiver that loses its connection keeps only what is frozen") {
  for (const at where : all_states) {
    auto tried = receiver_at(where);
    tried.receiver.lose();
    CHECK(tried.polled().empty());
    if (where == at::frozen || where == at::frozen_held) {
      CHECK(tried.receiver.state() == frozen);
      CHECK(same_bits(tried.receiver.frame(), recorded().frame));
      CHECK_FALSE(tried.receiver.release(tried.now));
      CHECK(tried.receiver.state() == waiting);
    } else {
      CHECK(tried.receiver.state() == failed);
    }
  }
}

TEST_CASE("times: the answer to a PROBE, what goes out unasked, reports and ticks") {
  tried_receiver tried;
  REQUIRE_FALSE(tried.give(recorded().first.begin));
  CHECK(tried.polled() == types{control_type::ready});
  // Ticks behind READY, 5 ms apart and for 100 ms.
  const instant began = tried.now;
  std::size_t ticks = 0;
  while (tried.receiver.deadline() < bounded::never) {
    tried.now = tried.receiver.deadline();
    CHECK(tried.polled() == types{control_type::tick});
    ++ticks;
  }
  CHECK(ticks == 20);
  CHECK(tried.now == began + 100ms);
  // Fifteen packets are no report, sixteen are one after 5 ms, which have gone by.
  for (std::size_t k = 0; k < 15; ++k) tried.packet(k);
  CHECK(tried.polled().empty());
  // Nothing comes for 2 quiets: unasked; and not again without something new.
  CHECK(tried.receiver.deadline() == tried.now + 6ms);
  tried.now += 6ms - 1ns;
  CHECK(tried.polled().empty());
  tried.now += 1ns;
  CHECK(tried.polled() == types{control_type::wanted});
  CHECK(tried.last.round == bounded::unasked_round);
  tried.packet(15);
  CHECK(tried.receiver.deadline() == tried.now + 12ms);  // twice as long as before
  tried.now += 12ms;
  CHECK(tried.polled() == types{control_type::wanted});
  // PROBE, which is answered after a quiet, or when all of its round have been seen.
  REQUIRE_FALSE(tried.give(recorded().first.probe));
  CHECK(tried.polled().empty());
  CHECK(tried.receiver.deadline() == tried.now + 3ms);
  tried.now += 2ms;
  tried.packet(16);
  CHECK(tried.receiver.deadline() == tried.now + 3ms);
  tried.now += 3ms;
  CHECK(tried.polled() == types{control_type::wanted});
  CHECK(tried.last.round == 0);
  // The second round brings nothing, and a third PROBE before its time is refused.
  REQUIRE_FALSE(tried.give(message(control_type::probe, 1, 1, std::uint32_t{20})));
  CHECK(tried.polled() == types{control_type::wanted});  // it says that none went out
  CHECK(tried.give(message(control_type::probe, 1, 1, bytes(4))) == unexpected);
}

TEST_CASE("times: a quiet is twice the least round trip of eight, and at least 3 ms") {
  bounded::heartbeat beats(2s);
  CHECK(beats.lost_at() == bounded::never);  // nobody was there yet
  // Any bytes may come as a PONG.
  for (const instant any : {instant::min(), instant::max(), instant(-1)}) beats.pong(any, 1h);
  CHECK(beats.quiet() == 3ms);
  beats.pong(1s, 1s + 840ms);
  beats.pong(1s + 800ms, 1s + 840ms);  // a PING that was lost does not make a quiet long
  CHECK(beats.quiet() == 80ms);
  beats.pong(9s, 3s);  // of the future
  CHECK(beats.quiet() == 80ms);
  beats.ping_sent(3s);
  CHECK(beats.ping_at() == 3s + 50ms);  // until eight have come
  for (int k = 0; k < 7; ++k) {
    CHECK(beats.quiet() == 80ms);
    beats.pong(2s, 2s + 50ms);
  }
  beats.pong(2s, 2s + 60ms);
  CHECK(beats.quiet() == 100ms);  // one does not stay for ever
  beats.ping_sent(3s);
  CHECK(beats.ping_at() == 3s + 500ms);
  beats.heard(3s);
  CHECK(beats.lost_at() == 5s);
  beats.heard(5s);
  CHECK(beats.lost_at() == 7s);
}

TEST_CASE("times: a way that lets no packet through ends by itself, and says how") {
  const cut_frame frame({800}, {.seed = 96, .bound_ppm = 100'000});
  simulated_link link(frame.grid, {.data = {.loss = 1}});
  link.transfer(frame.chunks);
  CHECK(link.receiver.state() == failed);
  CHECK(link.receiver.failure() == errc::nothing_arrives);
  CHECK(link.now > 10s);
  CHECK(link.now < 11s);
  // At the least rate, so that it is no flood: 100 Mb/s for 10 s.
  CHECK(link.sender.counters().wire_bytes * 8 < 1'100'000'000);
  link.run([] { return false; });
  while (link.sender.is_under_way() && link.step()) {
  }
  CHECK(link.sender.failure() == errc::aborted);
}

}  // namespace lamina_test::receiver_test
