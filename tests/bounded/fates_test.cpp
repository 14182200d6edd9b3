// SPDX-License-Identifier: MIT
// Every fate of every packet of a small transfer.
#include <array>
#include <cstring>

#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::fates_test {

using bounded::chunk_grid;

namespace {

enum class fate { lost, in_time, late, twice };

// Fragments of two chunks, of which one may be missing.
void check_fates(const std::array<fate, 4>& fates, stop_policy stop, const bounded::frame_chunks& chunks,
                 const chunk_grid& grid, const made_frame<float>& made) {
  simulated_link link(grid, {.stop = stop});
  link.delays = [&](const bounded::outgoing_packet& packet) -> std::vector<instant> {
    bounded::packet_header header;
    std::memcpy(&header, packet.header.data(), sizeof header);
    if ((header.flags & bounded::flag_sent_before) != 0) return {50us};
    switch (fates[2 * header.fragment + header.chunk]) {
      case fate::lost:
        return {};
      case fate::in_time:
        return {50us};
      case fate::late:
        return {50ms};
      default:
        return {50us, 60us};
    }
  };
  link.transfer(chunks);
  REQUIRE(link.sender.state() == sender_state::done);
  REQUIRE(same_delivery(link.sender.arrived(), link.receiver.arrived()));
  REQUIRE(holds_what_arrived(link.receiver, made.frame(), grid));
  const auto frame = link.receiver.frame();
  const std::vector<std::byte> before(frame.begin(), frame.end());
  link.run([] { return false; });  // what is late comes
  REQUIRE(same_bits(link.receiver.frame(), before));
  REQUIRE(link.sender.state() == sender_state::done);

  std::uint64_t repeated = 0;
  std::uint64_t late = 0;
  for (std::size_t fragment = 0; fragment < 2; ++fragment) {
    const auto comes = [&](std::size_t index) {
      const fate each = fates[2 * fragment + index];
      late += each == fate::late ? 1 : 0;
      return each == fate::in_time || each == fate::twice;
    };
    const bool comes_0 = comes(0);
    const bool comes_1 = comes(1);
    const std::size_t lost = link.sender.arrived().lost_chunks(fragment);
    REQUIRE(lost <= 1);
    if (!comes_0 && !comes_1) repeated += 2;
    // What comes in time is there, but for what eager stops before.
    if (stop == stop_policy::on_probe) {
      REQUIRE(link.sender.arrived().is_lost(fragment, 0) <= !comes_0);
      REQUIRE(link.sender.arrived().is_lost(fragment, 1) <= !comes_1);
    }
  }
  REQUIRE(link.sender.counters().packets == 4 + repeated);
  REQUIRE(link.sender.counters().repeated == repeated);
  REQUIRE(link.receiver.counters().of(packet_fate::late) >= late);
}

}  // namespace

TEST_CASE("states: each packet of two fragments of two chunks lost, in time, late or twice") {
  std::mt19937 random(97);
  const lamina::layout model = model_of({16, 16});
  const auto grid = chunk_grid::of<float>(model, payload_type::as_is, 8);
  const made_frame<float> made(random, model, everything(model));
  const auto chunks = made.cut(grid, 500'000);
  for (const stop_policy stop : {stop_policy::eager, stop_policy::on_probe}) {
    for (unsigned combination = 0; combination < 256; ++combination) {
      std::array<fate, 4> fates{};
      for (unsigned k = 0; k < 4; ++k) fates[k] = static_cast<fate>(combination >> (2 * k) & 3U);
      CAPTURE(static_cast<int>(stop), combination);
      check_fates(fates, stop, chunks, grid, made);
    }
  }
}

}  // namespace lamina_test::fates_test
