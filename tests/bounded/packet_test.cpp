// SPDX-License-Identifier: MIT
// Packets of any bytes: each gets a name, and only a good one changes anything.
#include "lamina/bounded/packet.hpp"

#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::packet_test {

using bounded::packet_header;

namespace {

using bytes = std::vector<std::byte>;

constexpr std::array<std::uint64_t, 10> limits = {0,
                                                  1,
                                                  0x7fff'ffff,
                                                  0x8000'0000,
                                                  0x8000'0001,
                                                  0xffff'ffff,
                                                  0x1'0000'0000,
                                                  std::uint64_t{1} << 62U,
                                                  std::uint64_t{1} << 63U,
                                                  ~std::uint64_t{0}};

struct field {
  const char* name;
  std::size_t offset, width;
};
#define LAMINA_FIELD(name)                                            \
  field {                                                             \
#name, offsetof(packet_header, name), sizeof(packet_header::name) \
  }

// A receiver with an open transfer of two fragments of three and one chunks, of which the first packets are held.
struct open_receiver {
  explicit open_receiver(payload_type type = payload_type::as_is)
      : frame({150, 40, 64}, {.seed = 61, .chunk_elements = 64, .type = type, .dropped = {2}}),
        link(frame.grid, {}) {
    link.is_dropped = [this](const bounded::outgoing_packet& packet) {
      packets.push_back(joined(packet));
      return true;
    };
    link.sender.begin(frame.chunks);
    link.run([this] { return link.sender.state() == sender_state::probing; });
  }
  packet_fate give(std::span<const std::byte> datagram) {
    return link.receiver.on_datagram(datagram, link.now);
  }
  packet_header header(std::size_t packet) const {
    packet_header read;
    std::memcpy(&read, packets[packet].data(), sizeof read);
    return read;
  }

  cut_frame frame;
  simulated_link link;
  std::vector<bytes> packets;
};

// The packet with a field set, under a good check.
bytes with_field(const bytes& good, const field& which, std::uint64_t value) {
  bytes changed = good;
  std::memcpy(changed.data() + which.offset, &value, which.width);
  return sealed(std::move(changed), 48);
}

}  // namespace

TEST_CASE("packet: every truncation and every flipped bit is refused by name, and changes nothing") {
  for (const payload_type type : {payload_type::as_is, payload_type::int8, payload_type::int4}) {
    open_receiver open(type);
    REQUIRE(open.packets.size() == 4);
    for (const bytes& good : open.packets) {
      for (std::size_t size = 0; size < good.size(); ++size) {
        const packet_fate fate = open.give(std::span(good).first(size));
        REQUIRE(fate == (size < 56 ? packet_fate::malformed : packet_fate::bad_check));
      }
      bytes longer = good;
      longer.push_back(std::byte{0});
      CHECK(open.give(longer) == packet_fate::bad_check);
      for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
        CAPTURE(bit);
        bytes flipped = good;
        flipped[bit / 8] ^= std::byte{1} << (bit % 8);
        packet_fate expected = packet_fate::bad_check;
        if (bit < 8 * 12) expected = packet_fate::foreign;
        if (bit < 8 * 8) expected = packet_fate::malformed;
        if (bit / 8 == 5 && bit % 8 < 2) expected = packet_fate::bad_check;
        if (bit / 8 == 6 && bit % 8 < 3) expected = packet_fate::bad_check;
        if (bit >= 8 * 12 && bit < 8 * 16) expected = packet_fate::stale;
        REQUIRE(open.give(flipped) == expected);
      }
    }
    CHECK(open.link.receiver.state() == receiver_state::open);
    CHECK(open.link.receiver.counters().of(packet_fate::placed) == 0);
    // Nothing was placed, and nothing was taken for placed.
    for (const bytes& good : open.packets) CHECK(open.give(good) == packet_fate::placed);
    CHECK(open.link.receiver.state() == receiver_state::frozen);
    CHECK(same_bits(open.link.receiver.frame(), open.frame.made.frame().to_bytes()));
    for (const bytes& good : open.packets) CHECK(open.give(good) == packet_fate::late);
  }
}

TEST_CASE("packet: a field at its limits under a good check ends the transfer by name, or is taken") {
  constexpr std::array checked = {LAMINA_FIELD(fragment), LAMINA_FIELD(chunk), LAMINA_FIELD(chunks),
                                  LAMINA_FIELD(offset), LAMINA_FIELD(data_bytes)};
  for (const field& each : checked) {
    for (const std::uint64_t value : limits) {
      if (each.width < 8 && value > 0xffff'ffff) continue;
      for (std::size_t packet = 0; packet < 4; ++packet) {
        open_receiver open;
        CAPTURE(each.name, value, packet);
        const bytes changed = with_field(open.packets[packet], each, value);
        if (changed == open.packets[packet]) continue;
        CHECK(open.give(changed) == packet_fate::inconsistent);
        CHECK(open.link.receiver.state() == receiver_state::failed);
        const std::error_code why = open.link.receiver.failure();
        CHECK((why == errc::no_such_chunk || why == errc::wrong_sizes));
        CHECK(open.link.receiver.counters().of(packet_fate::placed) == 0);
      }
    }
  }
  // Whatever stands in these, the packet is good.
  for (const field& each : {LAMINA_FIELD(transmission), LAMINA_FIELD(sent_at)}) {
    for (const std::uint64_t value : limits) {
      if (value > 0xffff'ffff) continue;
      open_receiver open;
      CHECK(open.give(with_field(open.packets[0], each, value)) == packet_fate::placed);
    }
  }
}

TEST_CASE("packet: what is no chunk of the transfer is refused, whatever the check says") {
  struct row {
    const char* what;
    std::uint32_t fragment, chunks;
    std::uint8_t flags;
  };
  for (const row& each : {row{"a fragment that is dropped", 2, 1, 0},
                          row{"a repair that nobody announced", 2, 1, bounded::flag_repair},
                          row{"a chunk of the frame that says to be a repair", 0, 3, bounded::flag_repair}}) {
    CAPTURE(each.what);
    open_receiver open;
    packet_header header = open.header(0);
    header.fragment = each.fragment;
    header.chunk = 0;
    header.chunks = each.chunks;
    header.offset = 0;
    header.data_bytes = 256;
    header.flags = each.flags;
    bytes all(sizeof header + 256);
    std::memcpy(all.data(), &header, sizeof header);
    CHECK(open.give(sealed(all, 48)) == packet_fate::inconsistent);
    CHECK(open.link.receiver.failure() == errc::no_such_chunk);
    CHECK(open.give(open.packets[0]) == packet_fate::stale);  // it has failed
  }
}

TEST_CASE("packet: nonsense costs comparisons, and only what is plausible a hash") {
  open_receiver open;
  std::mt19937 random(62);
  bytes any(1464);
  for (int k = 0; k < 10'000; ++k) {
    for (std::byte& each : any) each = static_cast<std::byte>(random());
    if (k % 2 == 0) std::copy_n(open.packets[0].begin(), 8, any.begin());   // of a good shape
    if (k % 4 == 0) std::copy_n(open.packets[0].begin(), 12, any.begin());  // and address
    open.give(std::span(any).first(below(random, any.size() + 1)));
  }
  CHECK(open.link.receiver.counters().hashed == 0);
  CHECK(open.link.receiver.state() == receiver_state::open);
  CHECK(open.link.receiver.counters().of(packet_fate::malformed) > 4000);
  CHECK(open.link.receiver.counters().of(packet_fate::foreign) > 2000);
  CHECK(open.link.receiver.counters().of(packet_fate::stale) > 2000);
  // Of another secret.
  bytes stranger = open.packets[0];
  bounded::keyed_check check(test_secret + 1);
  std::ranges::copy(
      bounded::write_packet_header(open.header(0), {std::span(stranger).subspan(56), {}}, check),
      stranger.begin());
  CHECK(open.give(stranger) == packet_fate::bad_check);
  CHECK(open.link.receiver.counters().hashed == 1);
}

}  // namespace lamina_test::packet_test
