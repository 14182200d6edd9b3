// SPDX-License-Identifier: MIT
// A transfer takes memory when it begins, by the layout, and no packet or message adds to it.
#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"
#include "counted_allocations.hpp"

namespace lamina_test::memory_test {

using bounded::chunk_grid;

namespace {

using datagram = std::array<std::byte, 2048>;

std::span<const std::byte> joined(const bounded::outgoing_packet& packet, datagram& into) {
  auto at = std::ranges::copy(packet.header, into.begin()).out;
  for (const auto piece : packet.data) at = std::ranges::copy(piece, at).out;
  return {into.data(), packet.size_bytes()};
}

// Both ends, without a network that allocates.
struct direct_link {
  direct_link(const chunk_grid& grid, stop_policy stop,
              lamina::frame_kind kind = lamina::frame_kind::gradients)
      : sender(grid, {.rank = 2, .secret = test_secret, .rate = {.link_bits = 1'000'000'000}}),
        receiver(grid, {.sender = 2,
                        .secret = test_secret,
                        .kind = kind,
                        .most_bound_ppm = bounded::most_bound_ppm,
                        .stop = stop}) {}

  bool up() {
    const auto all = sender.poll_control(now);
    if (!all.empty()) receiver.on_control(as_read(all), now);
    return !all.empty();
  }
  bool down() {
    const auto all = receiver.poll_control(now);
    if (!all.empty()) sender.on_control(as_read(all));
    return !all.empty();
  }
  // From READY on until the end; every third packet of the first round is lost, and some come twice.
  void finish() {
    while (sender.is_under_way()) {
      while (up() || down()) {
      }
      while (const auto packet = sender.next_packet(now)) {
        const auto bytes = joined(*packet, buffer);
        if (sender.round() == 0 && count++ % 3 == 0) continue;
        receiver.on_datagram(bytes, now);
        if (count % 5 == 0) receiver.on_datagram(bytes, now);
      }
      while (up() || down()) {
      }
      now = std::max(now + 1us, std::min(sender.deadline(), receiver.deadline()));
    }
  }

  bounded::bounded_sender sender;
  bounded::bounded_receiver receiver;
  datagram buffer{};
  instant now = 1s;
  std::size_t count = 0;
};

}  // namespace

TEST_CASE("memory: nothing is allocated after BEGIN, whatever is lost") {
  for (const payload_type type : {payload_type::as_is, payload_type::int4, payload_type::ternary}) {
    const cut_frame frame({5000, 0, 12'000, 7, 640},
                          {.seed = 121, .chunk_elements = 64, .bound_ppm = 100'000, .type = type});
    const std::vector required = {bounded::chunk{2, 3, 0}, bounded::chunk{0, 70, 0}};
    for (const stop_policy stop : {stop_policy::eager, stop_policy::on_probe}) {
      direct_link link(frame.grid, stop);
      for (int k = 0; k < 3; ++k) {
        link.receiver.release(link.now);
        link.sender.begin(frame.chunks, {.required = required});
        REQUIRE(link.up());
        REQUIRE(link.receiver.state() == receiver_state::open);
        CHECK(allocations_of([&] { link.finish(); }) == 0);
        CHECK(link.sender.state() == sender_state::done);
        CHECK(link.sender.counters().repeated > 0);
        CHECK(same_delivery(link.sender.arrived(), link.receiver.arrived()));
      }
    }
  }
}

TEST_CASE("memory: a BEGIN takes the frame and a little, once") {
  cut_frame::options options = {
      .seed = 122, .chunk_elements = 352, .bound_ppm = 100'000, .kind = lamina::frame_kind::parameters};
  const cut_frame whole({900'000, 100'000, 3}, options);
  options.dropped = {1, 2};
  const cut_frame some({900'000, 100'000, 3}, options);
  constexpr std::size_t little = 16'384;  // bitmaps of chunks, and 16 bytes a layer
  direct_link link(some.grid, stop_policy::eager, lamina::frame_kind::parameters);
  const auto begin = [&](const bounded::frame_chunks& chunks, std::vector<bounded::repair> repairs) {
    link.receiver.release(link.now);
    link.sender.begin(chunks, {.repairs = repairs});
    const std::size_t bytes = bytes_of([&] { link.up(); });
    REQUIRE(link.receiver.state() == receiver_state::open);
    link.finish();
    return bytes;
  };
  // With every chunk that is not in the frame repaired, it is as large as the layout.
  const std::vector repairs = {bounded::repair{1, 0, std::as_bytes(std::span(some.made.values[1]))},
                               bounded::repair{2, 0, std::as_bytes(std::span(some.made.values[2]))}};
  const std::size_t layout_bytes = 4 * some.model.elements() + 128 + 16;
  CHECK(begin(some.chunks, {}) < 4 * 900'000 + 128 + little);
  CHECK(begin(some.chunks, {}) < little);
  CHECK(begin(some.chunks, repairs) < layout_bytes + little);
  CHECK(begin(whole.chunks, {}) < little);
}

TEST_CASE("memory: what a BEGIN claims takes none") {
  const cut_frame frame({900'000}, {.seed = 123, .chunk_elements = 352, .bound_ppm = 100'000});
  for (const std::size_t field : {0U, 4U, 8U + 32U, 8U + 40U}) {
    direct_link link(frame.grid, stop_policy::eager);
    link.sender.begin(frame.chunks);
    std::vector<std::byte> claims = copy_of(link.sender.poll_control(link.now));
    std::fill_n(claims.begin() + 24 + static_cast<std::ptrdiff_t>(field), 4, std::byte{0x7f});
    CAPTURE(field);
    CHECK(bytes_of([&] { link.receiver.on_control(as_read(claims), link.now); }) == 0);
    CHECK(link.receiver.state() == receiver_state::failed);
  }
}

TEST_CASE("memory: a flood of a million packets of each kind adds nothing") {
  const cut_frame frame({64, 64}, {.seed = 124, .chunk_elements = 64});
  direct_link link(frame.grid, stop_policy::eager);
  link.sender.begin(frame.chunks);
  while (link.up() || link.down()) {
  }
  datagram first{}, second{};
  const auto one = joined(*link.sender.next_packet(link.now), first);
  const auto other = joined(*link.sender.next_packet(link.now), second);
  constexpr std::uint64_t flood = 1'000'000;
  const auto check_flood = [&](packet_fate expected, std::span<const std::byte> of) {
    const std::uint64_t before = link.receiver.counters().of(expected);
    CHECK(allocations_of([&] {
            for (std::uint64_t k = 0; k < flood; ++k) link.receiver.on_datagram(of, link.now);
          }) == 0);
    CHECK(link.receiver.counters().of(expected) == before + flood);
    CHECK(link.receiver.poll_control(link.now).size() <= 1024);  // nothing goes out for a packet
  };
  const auto check_changed = [&](packet_fate expected, std::size_t at) {
    datagram copy = second;
    copy[at] ^= std::byte{1};
    check_flood(expected, std::span(copy).first(other.size()));
  };
  CHECK(link.receiver.on_datagram(one, link.now) == packet_fate::placed);
  check_flood(packet_fate::duplicate, one);
  check_changed(packet_fate::malformed, 0);
  check_changed(packet_fate::foreign, 8);
  check_changed(packet_fate::stale, 12);
  check_changed(packet_fate::bad_check, 48);
  CHECK(link.receiver.state() == receiver_state::open);
  CHECK(link.receiver.on_datagram(other, link.now) == packet_fate::placed);
  check_flood(packet_fate::late, other);
  CHECK(same_bits(link.receiver.frame(), frame.made.frame().to_bytes()));
}

TEST_CASE("memory: a frame that there is no memory for waits, and opens when there is") {
  const cut_frame first({64, 640}, {.seed = 7, .dropped = {1}});
  const cut_frame larger({64, 640}, {.seed = 8});
  direct_link link(first.grid, stop_policy::eager);
  link.sender.begin(first.chunks);
  link.finish();
  REQUIRE(link.sender.state() == bounded::sender_state::done);
  link.sender.begin(larger.chunks);
  REQUIRE(link.up());  // kept, since the first was not taken yet
  for (int k = 0; k < 2; ++k) {
    granted = 0;
    const bool has_thrown = throws<std::bad_alloc>([&] { (void)link.receiver.release(link.now); });
    granted = std::numeric_limits<long>::max();
    CHECK(has_thrown);
  }
  REQUIRE_FALSE(link.receiver.release(link.now));
  REQUIRE(link.receiver.state() == bounded::receiver_state::open);
  link.finish();
  CHECK(link.sender.state() == bounded::sender_state::done);
  CHECK(same_bits(link.receiver.frame(), larger.made.frame().to_bytes()));
}

}  // namespace lamina_test::memory_test
