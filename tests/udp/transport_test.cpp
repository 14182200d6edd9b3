// SPDX-License-Identifier: MIT
// Whole transports, a rank a thread, over loopback.
#include "lamina/udp/transport.hpp"

#include <atomic>

#include "catch.hpp"
#include "ranks.hpp"

namespace lamina_test::transport_test {

namespace {

using Catch::Matchers::Contains;

void require_no_error(const std::vector<std::string>& said) {
  CHECK(said == std::vector<std::string>(said.size()));
}

constexpr std::uint64_t steps = 20;

// A server and two workers, as a run has them: parameters down, gradients up.
void exchange_frames(udp::transport& ranks, const ranks_given& given, std::uint32_t bound_ppm,
                     std::vector<std::vector<std::byte>>& server_saw,
                     std::vector<std::vector<std::byte>>& worker_saw) {
  const std::vector<std::size_t> workers = peers_of(0, ranks.ranks());
  for (std::uint64_t step = 1; step <= steps; ++step) {
    const test_frame down(given, lamina::frame_kind::parameters, step, step, bound_ppm);
    if (ranks.rank() == server_rank) {
      for (const auto& each : ranks.send_frame(workers, down.chunks())) {
        if (bound_ppm == 0 && (!each || !each->is_complete())) throw std::logic_error("a frame in part");
      }
      for (const udp::arrival& each : ranks.receive_from_each(workers)) {
        server_saw.emplace_back(each.bytes.begin(), each.bytes.end());
      }
      continue;
    }
    const udp::arrival got = ranks.receive_from_each({&server_rank, 1})[0];
    worker_saw.emplace_back(got.bytes.begin(), got.bytes.end());
    const test_frame up(given, lamina::frame_kind::gradients, step, 100 * ranks.rank() + step, bound_ppm);
    ranks.send_frame({&server_rank, 1}, up.chunks());
  }
}

}  // namespace

TEST_CASE("transport: with a bound of 0 every frame arrives whole, over a network that loses a fifth") {
  ranks_given given;
  SECTION("IPv4") {}
  SECTION("two paths") {
    given.paths = {loopback(), loopback("127.0.0.2")};
  }
  SECTION("IPv6") {
    given.paths = {loopback("::1")};
  }
  SECTION("a small MTU") {
    given.mtu = 576;
  }
  SECTION("a link of unknown rate") {
    given.link_bits = 0;
  }
  SECTION("answered on probe") {
    given.stop = bounded::stop_policy::on_probe;
  }
  if (given.paths[0].is_v6 != 0) {
    try {
      udp::packet_socket{given.paths[0]};
    } catch (const udp::error& none) {
      WARN("skipped: " << none.what());
      return;
    }
  }
  given.inject_loss = 0.2;
  std::vector<std::vector<std::byte>> server_saw;
  std::array<std::vector<std::vector<std::byte>>, 3> workers_saw;
  udp::transport_counters counted;
  require_no_error(run_ranks(3, given, [&](udp::transport& ranks) {
    exchange_frames(ranks, given, 0, server_saw, workers_saw.at(ranks.rank()));
    if (ranks.rank() == server_rank) counted = ranks.counters();
  }));
  REQUIRE(server_saw.size() == 2 * steps);
  for (std::uint64_t step = 1; step <= steps; ++step) {
    const auto down = test_frame(given, lamina::frame_kind::parameters, step, step).bytes();
    for (std::size_t worker = 1; worker <= 2; ++worker) {
      CHECK(workers_saw.at(worker).at(step - 1) == down);
      CHECK(server_saw.at(2 * (step - 1) + worker - 1) ==
            test_frame(given, lamina::frame_kind::gradients, step, 100 * worker + step).bytes());
    }
  }
  CHECK(counted.paths.at(0).injected > 0);
  CHECK(counted.foreign == 0);
  using bounded::packet_fate;
  for (const udp::peer_counters& each : counted.peers) {
    CHECK(each.sent.packets > 0);
    for (const packet_fate fate :
         {packet_fate::malformed, packet_fate::foreign, packet_fate::bad_check, packet_fate::inconsistent})
      CHECK(each.taken.of(fate) == 0);
  }
}

TEST_CASE("transport: with a bound both ends know the same of what is missing, and it is zeros") {
  ranks_given given;
  given.inject_loss = 0.1;
  given.most_bound_ppm = 200'000;
  given.stop = GENERATE(bounded::stop_policy::eager, bounded::stop_policy::on_probe);
  std::vector<lamina::delivery> sent;
  std::vector<lamina::delivery> arrived;
  std::vector<std::vector<std::byte>> bytes;
  require_no_error(run_ranks(2, given, [&](udp::transport& ranks) {
    for (std::uint64_t step = 1; step <= steps; ++step) {
      if (ranks.rank() == 1) {
        const test_frame up(given, lamina::frame_kind::gradients, step, step, 200'000);
        sent.push_back(*ranks.send_frame({&server_rank, 1}, up.chunks())[0]);
        continue;
      }
      const std::size_t worker = 1;
      const udp::arrival got = ranks.receive_from_each({&worker, 1})[0];
      arrived.push_back(got.arrived);
      bytes.emplace_back(got.bytes.begin(), got.bytes.end());
    }
  }));
  REQUIRE(sent.size() == steps);
  REQUIRE(arrived.size() == steps);
  const bounded::chunk_grid grid = grid_of(given);
  std::size_t lost = 0;
  for (std::size_t i = 0; i < steps; ++i) {
    const test_frame frame(given, lamina::frame_kind::gradients, i + 1, i + 1);
    CHECK(same_delivery(sent[i], arrived[i]));
    CHECK(holds_what_arrived(bytes[i], arrived[i], frame.frame(), grid));
    CHECK(keeps_bound(sent[i], grid, 200'000));
    lost += sent[i].lost_chunks();
  }
  CHECK(lost > 0);
}

TEST_CASE(
    "transport: a frame is taken while its receiver computes, and the next one waits until it is asked "
    "for") {
  const ranks_given given;
  std::promise<void> first_is_sent;
  std::atomic<bool> second_is_sent = false;
  std::atomic<bool> was_early = false;
  require_no_error(run_ranks(2, given, [&](udp::transport& ranks) {
    const std::size_t other = 1 - ranks.rank();
    if (ranks.rank() == 1) {
      send_one(ranks, given, {other});
      first_is_sent.set_value();
      send_one(ranks, given, {other});
      second_is_sent = true;
      return;
    }
    if (first_is_sent.get_future().wait_for(10s) != std::future_status::ready)
      throw std::logic_error("nobody answers");
    const udp::arrival first = ranks.receive_from_each({&other, 1})[0];
    std::this_thread::sleep_for(100ms);
    was_early = second_is_sent.load();
    if (!std::ranges::equal(first.bytes, test_frame(given, lamina::frame_kind::gradients, 1, 1).bytes()))
      throw std::logic_error("the frame does not stand");
    ranks.receive_from_each({&other, 1});
  }));
  CHECK_FALSE(was_early);
  CHECK(second_is_sent);
}

TEST_CASE("transport: a bound above the receiver's own is refused, and both say so") {
  ranks_given given;
  given.most_bound_ppm = 50'000;
  const auto said = run_ranks(2, given, [&](udp::transport& ranks) {
    const std::size_t other = 1 - ranks.rank();
    if (ranks.rank() == 0) {
      ranks.receive_from_each({&other, 1});
      return;
    }
    const test_frame up(given, lamina::frame_kind::gradients, 1, 1, 60'000);
    ranks.send_frame({&other, 1}, up.chunks());
  });
  CHECK_THAT(said[0],
             Contains("transfer from worker 0 to the server: transfer may lose more than this end accepts"));
  CHECK_THAT(said[1], Contains("the server has given up") && Contains("more than this end accepts"));
}

TEST_CASE(
    "transport: what is not there in time is named and comes later, and a rank that is no peer is named") {
  const ranks_given given;
  std::promise<void> was_late;
  require_no_error(run_ranks(2, given, [&](udp::transport& ranks) {
    const std::size_t other = 1 - ranks.rank();
    if (ranks.rank() == 1) {
      was_late.get_future().wait_for(10s);
      send_one(ranks, given, {other});
      return;
    }
    CHECK_THROWS_WITH(ranks.receive(2), Contains("rank 0 does not talk to 2"));
    CHECK_THROWS_WITH(ranks.receive(other, 50ms), "not done within 50 ms while waiting for worker 0");
    was_late.set_value();
    CHECK_FALSE(ranks.receive(other, 10s).bytes.empty());
  }));
}

TEST_CASE("transport: a frame that is not sent in time is given up, and its receiver hears of it") {
  ranks_given given;
  given.link_bits = 1'000'000;  // a frame takes more than a second
  const auto said = run_ranks(2, given, [&](udp::transport& ranks) {
    if (ranks.rank() == 1) {
      send_one(ranks, given, {server_rank}, 100ms);
    } else {
      ranks.receive(1);
    }
  });
  CHECK(said[1] == "not done within 100 ms while sending to the server");
  CHECK_THAT(said[0], Contains("worker 0 has given up"));
}

TEST_CASE("transport: options that contradict each other are refused") {
  const ranks_given given;
  const auto refusal = [&](auto change) {
    udp::transport_options options = options_of(given, 0, 2);
    udp::open_sockets here = start_rank(given, 0);
    std::vector<udp::rank_addresses> all(2, here.addresses);
    change(options, all);
    return message_of<std::exception>([&] { udp::transport(std::move(here), all, options); });
  };
  CHECK_THAT(refusal([](auto& options, auto&) { options.rank = 2; }), Contains("is one of 2 ranks"));
  CHECK_THAT(refusal([](auto&, auto& all) { all.pop_back(); }), Contains("has one of 1 addresses"));
  CHECK_THAT(refusal([](auto& options, auto&) { options.peers[0].rank = 0; }),
             Contains("rank 0 with peers the server and the server") && Contains("and once"));
  CHECK(refusal([](auto&, auto& all) { all[1].paths = 2; }) ==
        "worker 0 has 2 paths of IPv4, the server has 1 paths of IPv4");
}

}  // namespace lamina_test::transport_test
