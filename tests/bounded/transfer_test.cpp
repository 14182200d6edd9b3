// SPDX-License-Identifier: MIT
// Whole transfers over a network that loses, delays, reorders, duplicates and damages, in simulated time.
#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::transfer_test {

using bounded::chunk;
using bounded::chunk_grid;

namespace {

constexpr std::array every_type = {payload_type::as_is, payload_type::float16, payload_type::bfloat16,
                                   payload_type::int8,  payload_type::int4,    payload_type::ternary};

// Some of the fragments of 0, 1, 2, 10 and 1,000 chunks.
lamina::layout random_fragments(std::mt19937& random, std::size_t chunk_elements) {
  constexpr std::array<std::size_t, 5> chunks = {0, 1, 2, 10, 1000};
  std::vector<std::size_t> sizes(1 + below(random, 5));
  for (std::size_t& size : sizes) {
    size = chunks[below(random, 5)] * chunk_elements;
    if (size > 0) size -= below(random, chunk_elements);  // the last chunk may be shorter
  }
  return model_of(sizes);
}

lamina::selection random_selection(std::mt19937& random, const lamina::layout& model) {
  lamina::selection chosen(model);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    if (below(random, 4) > 0) chosen.send(l);
  }
  return chosen;
}

std::vector<chunk> random_chunks(std::mt19937& random, const chunk_grid& grid,
                                 const lamina::selection& sent) {
  std::vector<chunk> some;
  for (const std::size_t fragment : sent.sent()) {
    for (std::uint32_t i = 0; i < grid.chunks(fragment); ++i) {
      if (below(random, 20) == 0) some.push_back({static_cast<std::uint32_t>(fragment), i, 0});
    }
  }
  return some;
}

// Everything that is promised of a transfer that has ended.
void check_ended(const simulated_link& link, const lamina::encoded_frame& frame, const chunk_grid& grid,
                 std::uint32_t bound_ppm, const std::vector<chunk>& required) {
  INFO("sender: " << link.sender.failure().message() << ", receiver: " << link.receiver.failure().message());
  REQUIRE(link.sender.state() == sender_state::done);
  REQUIRE(link.receiver.state() == receiver_state::frozen);
  const lamina::delivery& arrived = link.sender.arrived();
  CHECK(same_delivery(arrived, link.receiver.arrived()));
  CHECK(holds_what_arrived(link.receiver, frame, grid));
  CHECK(keeps_bound(arrived, grid, bound_ppm));
  CHECK(std::ranges::none_of(required,
                             [&](const chunk& each) { return arrived.is_lost(each.fragment, each.index); }));
}

// Packets that were not of the transfer, which is what a flipped bit makes of one: it may be in the header.
std::uint64_t refused_by(const bounded::bounded_receiver& receiver) {
  std::uint64_t packets = 0;
  for (const packet_fate fate :
       {packet_fate::malformed, packet_fate::foreign, packet_fate::stale, packet_fate::bad_check})
    packets += receiver.counters().of(fate);
  return packets;
}

}  // namespace

TEST_CASE("transfer: no fragment of any transfer loses more than its bound, and nothing required is lost") {
  std::mt19937 random(41);
  for (const std::uint32_t bound_ppm : {0U, 1U, 50'000U, 100'000U, 200'000U, 500'000U}) {
    for (const stop_policy stop : {stop_policy::eager, stop_policy::on_probe}) {
      for (const double loss : {0.0, 0.05, 0.3, 0.6}) {
        CAPTURE(bound_ppm, static_cast<int>(stop), loss);
        const payload_type type = every_type[below(random, every_type.size())];
        const lamina::layout model = random_fragments(random, 64);
        const auto grid = chunk_grid::of<float>(model, type, 64);
        simulated_link link(
            grid,
            {.data = {.seed = random(), .loss = loss, .duplicate = 0.05, .damage = 0.05, .jitter = 300us},
             .stop = stop});
        for (int k = 0; k < 3; ++k) {
          const made_frame<float> made(random, model, random_selection(random, model), type);
          const std::vector<chunk> required = random_chunks(random, grid, made.sent);
          const std::uint64_t refused_before = refused_by(link.receiver);
          link.transfer(made.cut(grid, bound_ppm), {.required = required});
          check_ended(link, made.frame(), grid, bound_ppm, required);
          if (stop == stop_policy::on_probe && loss == 0) {
            // Only what was damaged may be missing.
            CHECK(link.sender.arrived().lost_chunks() <= refused_by(link.receiver) - refused_before);
          }
        }
      }
    }
  }
}

TEST_CASE("transfer: obligations that are no chunks of the transfer are refused") {
  const cut_frame frame(
      {100, 64}, {.seed = 46, .chunk_elements = 16, .kind = lamina::frame_kind::parameters, .dropped = {1}});
  bounded::bounded_sender sender(frame.grid, {});
  const auto refusal = [&](const std::vector<chunk>& required, const std::vector<bounded::repair>& repairs) {
    return message_of<std::invalid_argument>(
        [&] { sender.begin(frame.chunks, {.required = required, .repairs = repairs}); });
  };
  const auto bytes = std::as_bytes(std::span(frame.made.values[1]));
  CHECK(contains(refusal({{1, 0}}, {}), "chunk 0 of layer 1 is required, and not in the frame"));
  CHECK(contains(refusal({{0, 7}}, {}), "is required, and not in the frame"));
  CHECK(contains(refusal({}, {{0, 0, bytes.first(64)}}), "the repair of layer 'layer0'"));
  CHECK(contains(refusal({}, {{1, 8, bytes.first(64)}}), "does not consist of whole chunks"));
  CHECK(contains(refusal({}, {{1, 16, bytes.first(60)}}), "does not consist of whole chunks"));
  CHECK(contains(refusal({}, {{1, 16, bytes}}), "does not consist of whole chunks"));
  CHECK(sender.state() == sender_state::idle);
  sender.begin(frame.chunks, {.repairs = {{1, 48, bytes.last(64)}}});
  CHECK_THROWS_AS(sender.begin(frame.chunks), std::logic_error);
}

TEST_CASE("transfer: what answers wait for, and what goes out unasked") {
  // Data that take longer than the messages which overtake them: nothing is sent twice, and nothing is given up.
  for (const std::uint32_t bound_ppm : {0U, 100'000U}) {
    const cut_frame frame({8000}, {.seed = 48, .bound_ppm = bound_ppm});
    simulated_link link(frame.grid, {.data = {.delay = 2ms, .jitter = 500us}, .stop = stop_policy::on_probe});
    link.transfer(frame.chunks);
    CHECK(link.sender.counters().repeated == 0);
    CHECK(link.sender.counters().packets == 1000);
    CHECK(link.sender.arrived().is_complete());
  }
  // Messages of the sender take as long as TCP repeats them: BEGIN takes 200 ms, and no PROBE is waited for.
  const cut_frame few({8000}, {.seed = 48, .chunk_elements = 80});
  simulated_link late(few.grid, {.data = {.loss = 0.2}});
  late.up = lossy_channel({.delay = 200ms});
  late.transfer(few.chunks);
  CHECK(late.now < 300ms);
  CHECK(same_bits(late.receiver.frame(), few.made.frame().to_bytes()));
}

TEST_CASE("transfer: a slow sender is not answered packet by packet") {
  const cut_frame frame({800}, {.seed = 50});
  // 10 ms a packet, which is longer than a receiver waits before it asks.
  simulated_link link(frame.grid, {.rate = {.link_bits = 104'000}});
  link.receiver.set_load(1, 104'000);
  link.transfer(frame.chunks);
  CHECK(link.sender.state() == sender_state::done);
  CHECK(link.now > 800ms);
  CHECK(link.sender.counters().ignored < 12);
}

TEST_CASE("transfer: numbers wrap around") {
  std::mt19937 random(51);
  const lamina::layout model = model_of({400, 80});
  const auto grid = chunk_grid::of<float>(model, payload_type::as_is, 8);
  const std::uint32_t from = 0xffff'fffd;  // transfers 2^32 - 2, 2^32 - 1, 1, 2, 3
  // The clock of packets wraps in the third transfer or so.
  simulated_link link(grid, {.data = {.loss = 0.3, .duplicate = 0.1, .jitter = 1ms},
                             .stop = stop_policy::on_probe,
                             .last_transfer = from,
                             .begins_at = 4'294'967'296us - 20ms});
  std::vector<std::uint32_t> numbers;
  std::map<std::uint32_t, std::vector<std::byte>> first_packets;
  link.is_dropped = [&](const bounded::outgoing_packet& packet) {
    std::vector<std::byte>& first = first_packets[link.sender.transfer()];
    if (!first.empty()) return false;
    first = joined(packet);
    // What is of another transfer is stale, whether its number is smaller or larger.
    for (const auto& [number, other] : first_packets) {
      if (number == link.sender.transfer()) continue;
      CHECK(link.receiver.on_datagram(other, link.now) == packet_fate::stale);
    }
    return false;
  };
  for (int k = 0; k < 5; ++k) {
    const made_frame<float> made(random, model, everything(model));
    const std::uint32_t bound_ppm = k % 2 == 0 ? 0 : 100'000;
    link.transfer(made.cut(grid, bound_ppm));
    check_ended(link, made.frame(), grid, bound_ppm, {});
    numbers.push_back(link.sender.transfer());
  }
  CHECK(numbers == std::vector<std::uint32_t>{0xffff'fffe, 0xffff'ffff, 1, 2, 3});
  CHECK(link.now > 4'294'967'296us);
  CHECK(link.sender.counters().repeated > 0);
}

TEST_CASE("transfer: a report counts what was sent, and what of it came") {
  const cut_frame frame({400}, {.seed = 52});
  simulated_link link(frame.grid, {.data = {.jitter = 100us}});
  std::uint32_t last = 0;
  link.is_dropped = [&](const bounded::outgoing_packet& packet) {
    std::error_code error;
    const auto header = bounded::read_packet_header(packet.header, error);
    last = header.transmission;
    return header.chunk == 7;
  };
  link.sender.begin(frame.chunks);
  link.run(
      [&] { return link.sender.state() == sender_state::probing && link.data.next() == bounded::never; });
  CHECK(last == 49);
  const auto wanted = link.receiver.poll_control(link.now + 4ms);
  REQUIRE(wanted.size() > bounded::control_header_bytes);
  bounded::transfer_report report;
  REQUIRE_FALSE(
      bounded::read_list(wanted.subspan(bounded::control_header_bytes), frame.grid, report, [](auto...) {}));
  CHECK(report.seen == 50);
  CHECK(report.transmissions == 50);
  CHECK(report.received == 49);
}

}  // namespace lamina_test::transfer_test
