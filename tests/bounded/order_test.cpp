// SPDX-License-Identifier: MIT
// The order in which packets arrive changes nothing.
#include <algorithm>
#include <array>

#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::order_test {

using bounded::chunk_grid;

namespace {

using bytes = std::vector<std::byte>;

// The packets of the first round, and the PROBE behind it, of a frame whose BEGIN a new receiver gets each time.
struct recorded_transfer {
  explicit recorded_transfer(payload_type type, std::uint32_t bound_ppm)
      : random(81),
        model(model_of({700, 0, 64, 3000})),
        grid(chunk_grid::of<float>(model, type, 64)),
        made(random, model, everything(model), type),
        chunks(made.cut(grid, bound_ppm)),
        sender(grid, {.rank = 2, .receiver = 0, .secret = test_secret}),
        check(test_secret) {
    sender.begin(chunks);
    begin = copy_of(sender.poll_control(0s));
    bounded::control_writer writer(test_secret, 12);
    writer.put(std::uint64_t{0});
    writer.put(std::uint32_t{1});
    sender.on_control(read(writer.finish(bounded::control_type::ready, 1, 0)));
    for (instant now = 0s; sender.state() == sender_state::streaming; now += 10us) {
      while (const auto packet = sender.next_packet(now)) {
        packets.emplace_back(packet->header.begin(), packet->header.end());
        for (const auto piece : packet->data)
          packets.back().insert(packets.back().end(), piece.begin(), piece.end());
      }
    }
    probe = copy_of(sender.poll_control(0s));
  }
  static bytes copy_of(std::span<const std::byte> of) { return {of.begin(), of.end()}; }
  bounded::control_message read(std::span<const std::byte> all) {
    std::error_code error;
    const auto message = bounded::read_control(all, bounded::control_limits(grid), check, error);
    REQUIRE_FALSE(error);
    return message;
  }
  bounded::bounded_receiver opened(stop_policy stop) {
    bounded::bounded_receiver receiver(grid, {.rank = 0,
                                              .sender = 2,
                                              .secret = test_secret,
                                              .most_bound_ppm = bounded::most_bound_ppm,
                                              .stop = stop});
    REQUIRE_FALSE(receiver.on_control(read(begin), 0s));
    std::ignore = receiver.poll_control(0s);  // READY
    return receiver;
  }

  std::mt19937 random;
  lamina::layout model;
  chunk_grid grid;
  made_frame<float> made;
  bounded::frame_chunks chunks;
  bounded::bounded_sender sender;
  bounded::keyed_check check;
  bytes begin, probe;
  std::vector<bytes> packets;
};

}  // namespace

TEST_CASE("order: the same packets in any order, each twice, give the same bytes") {
  for (const payload_type type : {payload_type::as_is, payload_type::int4, payload_type::ternary}) {
    recorded_transfer recorded(type, 0);
    const bytes expected = recorded.made.frame().to_bytes();
    std::vector<bytes> twice = recorded.packets;
    twice.insert(twice.end(), recorded.packets.begin(), recorded.packets.end());
    for (int k = 0; k < 100; ++k) {
      std::ranges::shuffle(twice, recorded.random);
      auto receiver = recorded.opened(stop_policy::eager);
      std::size_t placed = 0;
      for (const bytes& each : twice) {
        const packet_fate fate = receiver.on_datagram(each, 1ms);
        placed += fate == packet_fate::placed ? 1 : 0;
        REQUIRE((fate == packet_fate::placed || fate == packet_fate::duplicate || fate == packet_fate::late));
      }
      REQUIRE(placed == recorded.packets.size());
      REQUIRE(receiver.state() == receiver_state::frozen);
      REQUIRE(same_bits(receiver.frame(), expected));
    }
  }
}

TEST_CASE("order: what has arrived before the freeze decides, and nothing that comes after it") {
  for (const payload_type type : {payload_type::as_is, payload_type::int4, payload_type::ternary}) {
    recorded_transfer recorded(type, 300'000);
    // All fragments but the short one miss some.
    std::vector<bytes> early, late;
    for (std::size_t k = 0; k < recorded.packets.size(); ++k) {
      (k % 6 == 5 ? late : early).push_back(recorded.packets[k]);
    }
    std::optional<bytes> expected_frame, expected_stop;
    for (int k = 0; k < 100; ++k) {
      std::ranges::shuffle(early, recorded.random);
      auto receiver = recorded.opened(stop_policy::on_probe);
      for (const bytes& each : early) REQUIRE(receiver.on_datagram(each, 1ms) == packet_fate::placed);
      REQUIRE_FALSE(receiver.on_control(recorded.read(recorded.probe), 1ms));
      REQUIRE(receiver.state() == receiver_state::open);  // more may be under way
      REQUIRE(receiver.poll_control(4ms - 1ns).empty());
      const bytes stop = recorded_transfer::copy_of(receiver.poll_control(4ms));
      REQUIRE(receiver.state() == receiver_state::frozen);
      REQUIRE(recorded.read(stop).header.type == bounded::control_type::stop);
      if (!expected_frame) {
        expected_frame = recorded_transfer::copy_of(receiver.frame());
        expected_stop = stop;
        CHECK(receiver.arrived().lost_chunks() == late.size());
      }
      REQUIRE(same_bits(receiver.frame(), *expected_frame));
      // Where what was seen last differs, so does the report in front of the list.
      REQUIRE(same_bits(std::span(stop).subspan(24 + 28), std::span(*expected_stop).subspan(24 + 28)));
      // Beyond STOP, and beyond the release.
      for (const bytes& each : late) REQUIRE(receiver.on_datagram(each, 5ms) == packet_fate::late);
      REQUIRE(same_bits(receiver.frame(), *expected_frame));
      REQUIRE_FALSE(receiver.release(6ms));
      for (const bytes& each : late) REQUIRE(receiver.on_datagram(each, 7ms) == packet_fate::stale);
    }
  }
}

TEST_CASE("order: several paths of unequal delay give the same bytes as one") {
  std::mt19937 random(82);
  const lamina::layout model = model_of({640, 3000, 10});
  const auto grid = chunk_grid::of<float>(model, payload_type::as_is, 8);
  const made_frame<float> made(random, model, everything(model));
  const auto chunks = made.cut(grid, 0);
  for (const std::uint32_t paths : {1U, 2U, 5U}) {
    for (const double loss : {0.0, 0.1}) {
      // Longer than a receiver waits for the last, too, so that chunks come twice.
      for (const instant delay : {instant(500us), instant(5ms)}) {
        simulated_link link(grid, {.data = {.loss = loss, .paths = paths, .path_delay = delay}});
        link.transfer(chunks);
        REQUIRE(link.sender.state() == sender_state::done);
        CHECK(same_bits(link.receiver.frame(), made.frame().to_bytes()));
        CHECK((link.sender.counters().repeated == 0) == (loss == 0 && (paths == 1 || delay < 1ms)));
      }
    }
  }
}

}  // namespace lamina_test::order_test
