// SPDX-License-Identifier: MIT
// What becomes of a rank whose peer dies at any point of a transfer, falls silent, or breaks the protocol. It is driven by hand, so that
// each of these points is met.
#include "catch.hpp"
#include "raw_peer.hpp"

namespace lamina_test::faults_test {

namespace {

using bounded::control_type;
using Catch::Matchers::Contains;

constexpr std::size_t raw = 1;

/// A frame of gradients.
test_frame frame_of(const ranks_given& given) {
  return test_frame(given, lamina::frame_kind::gradients, 1, 1);
}

void receive_one(udp::transport& ranks) {
  ranks.receive_from_each({ranks.rank() == server_rank ? &raw : &server_rank, 1});
}

}  // namespace

TEST_CASE("udp faults: a worker that dies before a transfer, or during it, has sent nothing, and is named") {
  const ranks_given given;
  const bool has_begun = GENERATE(false, true);
  const auto said = run_with_raw_peer(given, receive_one, [&](raw_peer& peer) {
    if (!has_begun) return;
    const test_frame frame = frame_of(given);
    peer.sender.begin(frame.chunks());
    // Every other packet: PROBE is answered with WANTED, where it ends.
    peer.run_until(control_type::wanted, [](std::size_t i) { return i % 2 == 0; });
  });
  CHECK(said[0] == "connection closed while waiting for worker 0");
}

TEST_CASE(
    "udp faults: a worker that dies between the sending of STOP and its receipt has sent its frame, once") {
  const ranks_given given;
  std::vector<std::byte> taken;
  const auto said = run_with_raw_peer(
      given,
      [&](udp::transport& ranks) {
        const udp::arrival got = ranks.receive_from_each({&raw, 1})[0];
        taken.assign(got.bytes.begin(), got.bytes.end());
        receive_one(ranks);
      },
      [&](raw_peer& peer) {
        const test_frame frame = frame_of(given);
        peer.sender.begin(frame.chunks());
        peer.run_until(control_type::stop);
        // It has not heard of it: nothing is committed at this end.
        if (!peer.sender.is_under_way()) throw std::logic_error("it has heard of STOP");
      });
  CHECK(said[1].empty());
  CHECK(taken == frame_of(given).bytes());
  CHECK(said[0] == "connection closed while waiting for worker 0");
}

TEST_CASE(
    "udp faults: a worker that takes a frame and dies before it says STOP is lost to its sender, and the "
    "others have theirs") {
  const ranks_given given;
  bool was_lost = false;
  const auto said = run_with_raw_peer(
      given,
      [&](udp::transport& ranks) {
        if (ranks.rank() != server_rank) return receive_one(ranks);
        const std::vector<std::size_t> to = {1, 2};
        try {
          send_one(ranks, given, to);
        } catch (const udp::peers_lost& loss) {
          was_lost = loss.ranks() == std::vector<std::size_t>{1} && !loss.sent().at(0) && loss.sent().at(1) &&
                     loss.sent().at(1)->is_complete();
          throw;
        }
      },
      [&](raw_peer& peer) {
        peer.run_until(control_type::begin);
        peer.receiver.on_control(peer.channel.message(), clock_now());
        while (peer.receiver.state() == bounded::receiver_state::open) {
          say_all(peer.receiver, clock_now(),
                  [&](std::span<const std::byte> bytes) { peer.channel.put(bytes); });
          peer.channel.write();
          peer.path().receive(64, [&](const endpoint&, std::span<const std::byte> bytes, bounded::instant) {
            peer.receiver.on_datagram(bytes, clock_now());
          });
        }
        if (peer.receiver.state() != bounded::receiver_state::frozen) throw std::logic_error("not taken");
      },
      1);
  CHECK(said[1].empty());
  CHECK(said[2].empty());
  CHECK(was_lost);
  CHECK(said[0] == "connection closed while sending to worker 0");
}

TEST_CASE("udp faults: a worker of which nothing is heard is lost after the timeout, sending and waiting") {
  ranks_given given;
  given.timeout = 1s;
  const bool sends = GENERATE(false, true);
  const auto said = run_with_raw_peer(
      given,
      [&](udp::transport& ranks) {
        if (!sends) return receive_one(ranks);
        send_one(ranks, given, {raw});
      },
      [](raw_peer& peer) {
        std::byte one{};  // until the server closes
        while (recv(peer.channel.descriptor_number(), &one, 1, 0) != 0) std::this_thread::sleep_for(1ms);
      });
  CHECK(said[0] == std::string("nothing heard for 1000 ms while ") + (sends ? "sending to" : "waiting for") +
                       " worker 0");
}

TEST_CASE("udp faults: a worker that computes long is not lost, as its thread answers") {
  ranks_given given;
  given.timeout = 1s;
  const auto said = run_ranks(2, given, [&](udp::transport& ranks) {
    const std::size_t other = 1 - ranks.rank();
    if (ranks.rank() == 1) {
      std::this_thread::sleep_for(1500ms);
      send_one(ranks, given, {other});
      return;
    }
    ranks.receive_from_each({&other, 1});
  });
  CHECK(said[0].empty());
}

TEST_CASE("udp faults: packets that mean nothing and those of a stranger are counted, and nothing ends") {
  const ranks_given given;
  udp::transport_counters counted;
  const auto said = run_with_raw_peer(
      given,
      [&](udp::transport& ranks) {
        receive_one(ranks);
        counted = ranks.counters();
      },
      [&](raw_peer& peer) {
        const test_frame frame = frame_of(given);
        peer.open(frame.chunks());
        const bounded::outgoing_packet good = *peer.sender.next_packet(clock_now());
        using header = bounded::packet_header;
        for (const auto& each : {forged(good, [](header& of) { ++of.magic; }),
                                 forged(good, [](header& of) { of.transfer += 9; }),
                                 forged(good, [](header& of) { of.receiver = 5; }),
                                 forged(
                                     good, [](header&) {}, run_secret + 1),
                                 good, good})
          peer.path().put(peer.server, each, 0);
        peer.path().flush();
        udp::packet_socket stranger(loopback());
        stranger.put(peer.server, good, 0);
        stranger.flush();
        peer.run_until(control_type::stop);
      });
  CHECK(said[0] + said[1] == "");
  CHECK(counted.foreign == 1);
  using bounded::packet_fate;
  for (const packet_fate fate : {packet_fate::malformed, packet_fate::stale, packet_fate::foreign,
                                 packet_fate::bad_check, packet_fate::duplicate}) {
    INFO(static_cast<int>(fate));
    CHECK(counted.peers.at(0).taken.of(fate) == 1);
  }
}

TEST_CASE("udp faults: a peer that breaks the protocol ends the run by its name, and hears why") {
  struct fault {
    const char* said;
    std::function<void(raw_peer&)> commit;
  };
  ranks_given given;
  const test_frame frame = frame_of(given);
  // A packet of the transfer that is open, changed, with a good check.
  const auto forge = [&](raw_peer& peer, const std::function<void(bounded::packet_header&)>& change) {
    peer.open(frame.chunks());
    peer.path().put(peer.server, forged(*peer.sender.next_packet(clock_now()), change), 0);
    peer.path().flush();
  };
  const std::string up = "transfer from worker 0 to the server: ";
  const std::vector<fault> faults = {
      {"chunk is not of this transfer",
       [&](raw_peer& peer) { forge(peer, [](auto& header) { header.chunk = 1 << 30; }); }},
      {"sizes are not those of the chunk",
       [&](raw_peer& peer) { forge(peer, [](auto& header) { ++header.offset; }); }},
      {"message does not belong to the state of the transfer",
       [](raw_peer& peer) { peer.say(control_type::probe, 7, 0, {1}); }},
      {"bytes are missing",
       [](raw_peer& peer) {
         peer.say(control_type::begin, 1, 0, {1, 2});
       }},
  };
  for (const fault& each : faults) {
    INFO(each.said);
    std::string heard;
    const auto said = run_with_raw_peer(given, receive_one, [&](raw_peer& peer) {
      each.commit(peer);
      peer.run([&](const bounded::control_message& come) {
        if (come.header.type != control_type::abort) return false;
        std::error_code error;
        heard = std::string(bounded::read_abort(come.body, error));
        return false;
      });
    });
    CHECK(said[0] == up + each.said);
    CHECK(heard == each.said);
  }
  const auto rejected = [&](control_type type, const std::vector<std::uint32_t>& numbers) {
    return run_with_raw_peer(given, receive_one, [&](raw_peer& peer) {
      peer.say(type, 1, 0, numbers);
      peer.run_until_closed();
    })[0];
  };
  CHECK_THAT(rejected(control_type::hello, {}),
             Contains("worker 0 sent a bad control message: message does not belong to the state"));
  CHECK_THAT(
      rejected(control_type::probe, {1, 2}),
      Contains("worker 0 sent a bad control message: message is not as long as its type and fields say"));
}

TEST_CASE(
    "udp faults: a receiver that says STOP beyond the bound is not believed, and the frame is let go at "
    "once") {
  ranks_given given;
  given.link_bits = 1'000'000;  // so that the other's transfer is under way for a second
  const auto said = run_with_raw_peer(
      given,
      [&](udp::transport& ranks) {
        if (ranks.rank() != server_rank) return receive_one(ranks);
        const std::vector<std::size_t> to = {1, 2};
        std::string why;
        try {
          send_one(ranks, given, to);
        } catch (const udp::error& error) {
          why = error.what();  // the frame is gone: a sanitizer sees whoever still reads it
        }
        std::this_thread::sleep_for(100ms);
        throw udp::error(why);
      },
      [](raw_peer& peer) {
        peer.say_ready();
        const std::vector<std::byte> nothing(peer.grid.bitmap_bytes(0));
        peer.channel.put(
            list_message(control_type::stop, peer.channel.message().header.transfer, 0, {{0, nothing}}));
        peer.channel.write();
        peer.run_until_closed();
      },
      1);
  CHECK(said[0] == "transfer from the server to worker 0: transfer ended with a fragment beyond its bound");
  CHECK_THAT(said[2], Contains("the server has given up"));
}

}  // namespace lamina_test::faults_test
