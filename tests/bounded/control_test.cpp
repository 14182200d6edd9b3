// SPDX-License-Identifier: MIT
// Control messages of any bytes: each gets a name, reads only within them and changes nothing where it is refused.
#include "lamina/bounded/control.hpp"

#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::control_test {

using bounded::chunk_grid;
using bounded::control_type;

namespace {

using bytes = std::vector<std::byte>;

const lamina::layout& some_model() {
  static const lamina::layout model = model_of({150, 0, 40, 640});
  return model;
}
const chunk_grid& some_grid() {
  static const auto grid = chunk_grid::of<float>(some_model(), payload_type::as_is, 64);
  return grid;
}

// With another value in a field of a body, whose bytes are all there.
template <class Value>
bytes with(const bytes& good, std::size_t offset_in_body, Value value) {
  bytes changed = good;
  std::memcpy(changed.data() + 24 + offset_in_body, &value, sizeof value);
  return sealed(std::move(changed), 16);
}

std::error_code verdict(std::span<const std::byte> all) {
  std::error_code error;
  bounded::keyed_check check(test_secret);
  bounded::read_control(all, bounded::control_limits(some_grid()), check, error);
  return error;
}
std::span<const std::byte> body_of(const bytes& all) {
  return std::span(all).subspan(24);
}

bounded::transfer_report some_report() {
  return {.granted_bits = 0x0102030405060708,
          .received = 11,
          .transmissions = 12,
          .delay_us = 13,
          .seen = 14,
          .open_transfers = 15};
}
bytes some_list(control_type type) {
  // Of 3 chunks, and of 10.
  return list_message(type, 5, 2, {{0, {std::byte{0b101}}}, {3, {std::byte{0xfe}, std::byte{0x03}}}},
                      some_report());
}

// A BEGIN, as the sender writes it, of a frame of fragments 0 and 3 in which chunk 4 of fragment 3 is required.
bytes some_begin(lamina::frame_kind kind = lamina::frame_kind::gradients) {
  const cut_frame frame(
      {150, 0, 40, 640},
      {.seed = 71, .chunk_elements = 64, .bound_ppm = 100'000, .kind = kind, .dropped = {2}});
  bounded::bounded_sender sender(frame.grid, {.secret = test_secret});
  const std::vector required = {bounded::chunk{3, 4, 0}};
  sender.begin(frame.chunks, {.required = required});
  return copy_of(sender.poll_control(0s));
}

// What a receiver that waits says of a BEGIN.
std::error_code opened(const bytes& begin, lamina::frame_kind kind = lamina::frame_kind::gradients,
                       std::uint32_t most_bound_ppm = 100'000) {
  bounded::bounded_receiver receiver(some_grid(),
                                     {.secret = test_secret, .kind = kind, .most_bound_ppm = most_bound_ppm});
  bounded::keyed_check check(test_secret);
  std::error_code error;
  const auto read = bounded::read_control(begin, bounded::control_limits(some_grid()), check, error);
  if (error) return error;
  error = receiver.on_control(read, 0s);
  REQUIRE((receiver.state() == (error ? receiver_state::failed : receiver_state::open)));
  if (!error) {
    // decode() takes the prefix for what it is, and the frame has the size that it says.
    std::error_code bad;
    lamina::decode<float>(receiver.frame(), some_model(), bad);
    REQUIRE_FALSE(bad);
  }
  return error;
}

}  // namespace

TEST_CASE("control: every truncation and every flipped bit is refused by name") {
  const std::array<bytes, 6> all = {some_begin(),
                                    some_list(control_type::wanted),
                                    some_list(control_type::stop),
                                    message(control_type::probe, 3, 1, std::uint32_t{77}),
                                    message(control_type::ready, 3, 0, std::uint64_t{5}, std::uint32_t{2}),
                                    message(control_type::tick, 0, 0)};
  for (const bytes& good : all) {
    REQUIRE_FALSE(verdict(good));
    for (std::size_t size = 0; size < good.size(); ++size) {
      REQUIRE(verdict(std::span(good).first(size)) == errc::truncated);
    }
    bytes longer = good;
    longer.push_back(std::byte{0});
    CHECK(verdict(longer) == errc::wrong_length);
    for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
      bytes flipped = good;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      const std::error_code error = verdict(flipped);
      CAPTURE(bit, error.message());
      if (bit < 8 * 4) {
        REQUIRE((error == errc::wrong_length || error == errc::truncated));
      } else if (bit < 8 * 5) {
        // Another type may take fewer bytes, or be none.
        REQUIRE((error == errc::wrong_length || error == errc::unknown_type || error == errc::bad_check));
      } else if (bit < 8 * 6) {
        REQUIRE(error == errc::unsupported_version);
      } else if (bit < 8 * 8) {
        REQUIRE(error == errc::nonzero_reserved);
      } else {
        REQUIRE(error == errc::bad_check);
      }
    }
  }
}

TEST_CASE("control: no type takes more memory than its own limit") {
  const bounded::control_limits limits(some_grid());
  const std::array<std::size_t, 14> expected = {
      0, 32, 8 + 64 + 128 + 8 * 14, 12, 28, 4, 32 + 14 / 8 + 8 * 4, 32 + 14 / 8 + 8 * 4, 1024, 0, 8, 8, 0, 0};
  for (std::uint32_t type = 0; type < 256; ++type) {
    for (const std::uint64_t body : {std::uint64_t{0}, std::uint64_t{type < 14 ? expected[type] : 0},
                                     std::uint64_t{type < 14 ? expected[type] : 0} + 1,
                                     std::uint64_t{0x7fffffff}, std::uint64_t{0xffffffff}}) {
      const bounded::control_header header{.body_bytes = static_cast<std::uint32_t>(body),
                                           .type = static_cast<control_type>(type)};
      std::error_code error;
      bounded::read_control_header(std::as_bytes(std::span(&header, 1)), limits, error);
      CAPTURE(type, body, error.message());
      if (type == 0 || type == 9 || type > 13) {
        CHECK(error == errc::unknown_type);
      } else if (body > expected[type]) {
        CHECK(error == errc::wrong_length);
      } else {
        CHECK_FALSE(error);
      }
    }
  }
}

TEST_CASE("control: a list says what was written, and nothing else is one") {
  const bytes good = some_list(control_type::wanted);
  bounded::transfer_report report;
  listed_bits listed;
  REQUIRE_FALSE(bounded::read_list(body_of(good), some_grid(), report,
                                   [&](std::uint32_t fragment, std::span<const std::byte> bits) {
                                     listed.emplace_back(fragment, bytes(bits.begin(), bits.end()));
                                   }));
  CHECK(report == some_report());
  CHECK(listed == listed_bits{{0, {std::byte{5}}}, {3, {std::byte{0xfe}, std::byte{3}}}});
  const auto refusal = [&](const bytes& all) {
    return bounded::read_list(body_of(all), some_grid(), report, [](auto...) {});
  };
  // 28: fragments; 32: the first fragment, 36 its bits; 37: the second, 41 its bits.
  CHECK(refusal(with(good, 28, std::uint32_t{1})) == errc::wrong_length);
  CHECK(refusal(with(good, 28, std::uint32_t{3})) == errc::truncated);
  CHECK(refusal(with(good, 28, std::uint32_t{0xffffffff})) == errc::truncated);
  CHECK(refusal(with(good, 28, std::uint32_t{0})) == errc::wrong_length);
  CHECK(refusal(with(good, 32, std::uint32_t{4})) == errc::no_such_chunk);
  CHECK(refusal(with(good, 32, std::uint32_t{0xffffffff})) == errc::no_such_chunk);
  CHECK(refusal(with(good, 37, std::uint32_t{0})) == errc::bad_list);       // twice
  CHECK(refusal(with(good, 32, std::uint32_t{3})) == errc::no_such_chunk);  // what follows is shifted
  CHECK(refusal(with(good, 36, std::uint8_t{0b1000})) == errc::bad_list);   // a fourth of three
  CHECK(refusal(with(good, 41, std::uint16_t{0x400})) == errc::bad_list);
  // Fragments in another order, or twice, each with bits of its own.
  for (const auto& [first, second] : {std::pair(3U, 0U), std::pair(0U, 0U), std::pair(3U, 3U)}) {
    listed_bits twice;
    for (const std::uint32_t fragment : {first, second})
      twice.emplace_back(fragment, bytes(some_grid().bitmap_bytes(fragment), std::byte{1}));
    CHECK(refusal(list_message(control_type::wanted, 5, 2, twice)) == errc::bad_list);
  }
  for (std::size_t size = 0; size < good.size() - 24; ++size) {
    REQUIRE(bounded::read_list(body_of(good).first(size), some_grid(), report, [](auto...) {}) ==
            errc::truncated);
  }
}

TEST_CASE("control: a BEGIN that is not what its receiver expects is refused by name") {
  const bytes good = some_begin();
  REQUIRE_FALSE(opened(good));
  CHECK(opened(good, lamina::frame_kind::parameters) == errc::unexpected_kind);
  CHECK(opened(good, lamina::frame_kind::gradients, 99'999) == errc::bound_too_large);
  for (const std::uint32_t count : {0U, 1U, 0x7fffffffU, 0x80000000U, 0xffffffffU}) {
    CAPTURE(count);
    CHECK(opened(with(good, 4, count)));
  }
  constexpr std::size_t prefix = 8, required = prefix + 128;
  struct row {
    std::size_t offset, width;
    std::uint64_t value;
    errc expected;
  };
  for (const row& each :
       {row{0, 4, 500'001, errc::bound_too_large},
        // The prefix, as decode() names it.
        row{prefix, 4, 0, errc::bad_magic}, row{prefix + 4, 2, 1, errc::unsupported_version},
        row{prefix + 6, 1, 2, errc::wrong_element_type}, row{prefix + 7, 1, 3, errc::unknown_kind},
        row{prefix + 7, 1, 2, errc::unexpected_kind}, row{prefix + 8, 4, 4, errc::nonzero_reserved},
        row{prefix + 8, 4, 0, errc::unexpected_sequence},  // not the last of its step
        row{prefix + 8, 4, 3, errc::has_checksum}, row{prefix + 24, 8, 1, errc::wrong_layout},
        row{prefix + 32, 4, 5, errc::wrong_layout}, row{prefix + 36, 2, 1, errc::unexpected_sequence},
        row{prefix + 38, 1, 1, errc::wrong_payload_type}, row{prefix + 38, 1, 6, errc::unknown_payload_type},
        row{prefix + 39, 1, 65, errc::nonzero_reserved}, row{prefix + 40, 8, 3161, errc::bad_payload_size},
        row{prefix + 40, 8, ~std::uint64_t{0}, errc::bad_payload_size},
        row{prefix + 52, 4, 1, errc::nonzero_reserved}, row{prefix + 56, 8, 1, errc::checksum_mismatch},
        row{prefix + 64, 1, 0b11001, errc::bad_presence},
        row{prefix + 64, 1, 0b1011, errc::bad_presence},  // an empty layer
        row{prefix + 127, 1, 1, errc::bad_presence}, row{prefix + 64, 1, 0b1101, errc::bad_payload_size},
        // The chunk that is required; fragment 2 is not in the frame.
        row{required, 4, 4, errc::no_such_chunk}, row{required, 4, 2, errc::no_such_chunk},
        row{required + 4, 4, 10, errc::no_such_chunk}}) {
    CAPTURE(each.offset, each.value);
    bytes changed = good;
    std::memcpy(changed.data() + 24 + each.offset, &each.value, each.width);
    CHECK(opened(sealed(changed, 16)) == each.expected);
  }
  // Of parameters such a chunk is repaired.
  const bytes parameters = some_begin(lamina::frame_kind::parameters);
  CHECK_FALSE(opened(with(with(parameters, required, std::uint32_t{2}), required + 4, std::uint32_t{0}),
                     lamina::frame_kind::parameters));
  // Required chunks stand in order, and once: one more behind the one that is there, 3 and 4.
  const auto with_another = [&](std::uint32_t fragment, std::uint32_t index) {
    return message(control_type::begin, 1, 0, body_of(good), fragment, index);
  };
  CHECK_FALSE(opened(with_another(3, 5)));
  CHECK(opened(with_another(3, 4)) == errc::bad_list);
  CHECK(opened(with_another(0, 2)) == errc::bad_list);
}

TEST_CASE("control: ABORT has a reason and a text, which is cut") {
  bounded::control_writer writer(test_secret, bounded::most_abort_bytes);
  struct verbose final : std::error_category {
    const char* name() const noexcept override { return "verbose"; }
    std::string message(int) const override { return std::string(2000, 'x'); }
  };
  const verbose category;
  const auto written = bounded::write_abort(writer, 9, {7, category});
  CHECK_FALSE(verdict(written));
  std::error_code error;
  CHECK(written[24] == std::byte{7});
  CHECK(bounded::read_abort(written.subspan(24), error) == std::string(1020, 'x'));
  CHECK_FALSE(error);
  bounded::read_abort(written.subspan(24).first(3), error);
  CHECK(error == errc::truncated);
}

}  // namespace lamina_test::control_test
