// SPDX-License-Identifier: MIT
// Bytes in: what decode() and peek() refuse, and by what name.
#include <stdexcept>

#include "frames.hpp"

namespace lamina_test::decoder_test {

using lamina::errc;
using lamina::payload_type;
using lamina::detail::wire_header;

namespace {

// Numbers at the limits of fields of 32 and 64 bits.
constexpr std::array<std::uint64_t, 9> limits = {
    0, 1, 0x7fffffff, 0x80000000, 0x80000001, 0xffffffff, 0x100000000, 0x8000000000000000, ~std::uint64_t{0}};

bytes patched(bytes frame, std::size_t at, std::uint8_t number) {
  frame[at] = std::byte{number};
  return frame;
}

// A frame of one bitmap byte and no checksum, with a payload of its claimed size.
template <class T>
bytes claiming(const lamina::layout& model, payload_type type, std::byte presence, std::size_t payload) {
  wire_header header = header_of<T>(model, type);
  header.payload_bytes = payload;
  bytes frame(payload_at + payload);
  std::memcpy(frame.data(), &header, sizeof header);
  frame[bitmap_at] = presence;
  return frame;
}

// What peek() says, which gives nothing on an error.
errc refusal_of_peek(std::span<const std::byte> first_bytes) {
  std::error_code error = make_error_code(errc::bad_magic);
  const lamina::frame_info info = lamina::peek(first_bytes, error);
  if (error) CHECK(info == lamina::frame_info{});
  return static_cast<errc>(error.value());
}
lamina::frame_info peeked(std::span<const std::byte> first_bytes) {
  std::error_code error;
  const lamina::frame_info info = lamina::peek(first_bytes, error);
  REQUIRE_FALSE(error);
  return info;
}

}  // namespace

TEMPLATE_TEST_CASE("codec: each field of the header is checked by name", "", float, double) {
  for (const payload_type type : payload_types) {
    const small_frame<TestType> small(type);
    const auto refused = [&](const auto& change) {
      const bytes bad = with_header(small.frame, change);
      const errc code = refusal<TestType>(bad, small.model);
      REQUIRE(refusal<TestType>(sealed(bad), small.model) == code);  // not only by the checksum
      return code;
    };
    const auto put = [&]<class Field>(Field wire_header::*field, std::uint64_t number) {
      return refused([&](wire_header& header) { header.*field = static_cast<Field>(number); });
    };
    const auto flip = [&]<class Field>(Field wire_header::*field, unsigned bit) {
      return refused([&](wire_header& header) { header.*field ^= static_cast<Field>(Field{1} << bit); });
    };
    CHECK(put(&wire_header::magic, 0xf44c414d) == errc::bad_magic);  // another byte order
    for (unsigned bit = 0; bit < 32; ++bit) CHECK(flip(&wire_header::magic, bit) == errc::bad_magic);
    for (const unsigned number : {0, 1, 3, 256, 65535})
      CHECK(put(&wire_header::version, number) == errc::unsupported_version);
    for (const unsigned number : {0, sizeof(TestType) == 4 ? 2 : 1, 3, 255})
      CHECK(put(&wire_header::element_type, number) == errc::wrong_element_type);
    for (const unsigned number : {0, 3, 5, 255}) CHECK(put(&wire_header::kind, number) == errc::unknown_kind);
    for (unsigned bit = 2; bit < 32; ++bit) CHECK(flip(&wire_header::flags, bit) == errc::nonzero_reserved);
    for (unsigned bit = 0; bit < 32; ++bit)
      CHECK(flip(&wire_header::reserved, bit) == errc::nonzero_reserved);
    for (const unsigned number : {65, 255})
      CHECK(put(&wire_header::user_bytes, number) == errc::nonzero_reserved);
    for (unsigned number = 6; number < 256; ++number)
      CHECK(put(&wire_header::payload_type, number) == errc::unknown_payload_type);
    for (const payload_type other : payload_types) {
      const bool has_its_size =
          lamina::payload_bytes<TestType>(other, 3) + lamina::payload_bytes<TestType>(other, 66) ==
          lamina::payload_bytes<TestType>(type, 3) + lamina::payload_bytes<TestType>(type, 66);
      if (!has_its_size)
        CHECK(put(&wire_header::payload_type, static_cast<unsigned>(other)) == errc::bad_payload_size);
    }
    for (const std::uint64_t number : limits) {
      CAPTURE(number);
      for (const bool is_more : {false, true}) {
        const auto change = [&]<class Field>(Field wire_header::*field) {
          return refused([&](wire_header& header) {
            const auto more = std::max<Field>(static_cast<Field>(number), 1);
            header.*field = static_cast<Field>(is_more ? header.*field + more : number);
          });
        };
        CHECK(change(&wire_header::layers) == errc::wrong_layout);
        CHECK(change(&wire_header::fingerprint) == errc::wrong_layout);
        CHECK(change(&wire_header::payload_bytes) == errc::bad_payload_size);
      }
    }
  }
}

TEST_CASE("decoder: the presence of layers must fit the payload, and be of layers that have elements") {
  const small_frame<float> small;
  const auto refused = [&](std::size_t at, std::uint8_t number) {
    const bytes bad = patched(small.frame, at, number);
    const errc code = refusal<float>(bad, small.model);
    REQUIRE(refusal<float>(sealed(bad), small.model) == code);
    return code;
  };
  CHECK(refused(bitmap_at, 0b111) == errc::bad_payload_size);
  CHECK(refused(bitmap_at, 0b001) == errc::bad_payload_size);
  CHECK(refused(bitmap_at, 0b1101) == errc::bad_presence);   // the empty layer
  CHECK(refused(bitmap_at, 0b10101) == errc::bad_presence);  // beyond the last layer
  CHECK(refused(bitmap_at + 1, 1) == errc::bad_presence);
  CHECK(refused(bitmap_at + 63, 0x80) == errc::bad_presence);
  // A claim that fits the presence, and not the bytes.
  const auto claims = [&](std::uint8_t presence, std::size_t elements) {
    const bytes bad = with_header(patched(small.frame, bitmap_at, presence),
                                  [&](wire_header& header) { header.payload_bytes = elements * 4; });
    return refusal<float>(sealed(bad), small.model);
  };
  CHECK(claims(0b111, 73) == errc::truncated);
  CHECK(claims(0b001, 3) == errc::trailing_bytes);
}

TEST_CASE("decoder: every truncation, longer copy and flipped bit is refused by name") {
  for (const payload_type type : payload_types) {
    const small_frame<float> small(type);
    const std::span<const std::byte> whole = small.frame;
    for (std::size_t size = 0; size < whole.size(); ++size)
      REQUIRE(refusal<float>(whole.first(size), small.model) == errc::truncated);
    bytes longer = small.frame;
    longer.push_back(std::byte{0});
    REQUIRE(refusal<float>(longer, small.model) == errc::trailing_bytes);
    REQUIRE(refusal<float>(sealed(longer), small.model) == errc::trailing_bytes);
    bytes unsaid = without_checksum(small.frame);
    unsaid[lamina::detail::checksum_offset] = std::byte{1};  // where there is none the field is zero
    REQUIRE(refusal<float>(unsaid, small.model) == errc::checksum_mismatch);
    bytes damaged = small.frame;
    for (std::size_t bit = 0; bit < 8 * damaged.size(); ++bit) {
      CAPTURE(bit);
      damaged[bit / 8] ^= std::byte{1} << (bit % 8);
      const errc code = refusal<float>(damaged, small.model);
      REQUIRE(code != errc{});
      if (bit / 8 >= payload_at) REQUIRE(code == errc::checksum_mismatch);
      damaged[bit / 8] ^= std::byte{1} << (bit % 8);
    }
  }
}

TEMPLATE_TEST_CASE("decoder: no frame has layers whose bytes cannot be counted", "", float, double) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const payload_type type : payload_types) {
    const auto refused = [&](const std::vector<std::size_t>& sizes, unsigned presence, std::size_t elements) {
      std::size_t claim = 0;  // wraps around to a few
      for (std::size_t l = 0; l < sizes.size(); ++l)
        claim += (presence >> l) % 2 * lamina::payload_bytes<TestType>(type, sizes[l]);
      if (claim >= 1000) claim = 0;
      const lamina::layout model = model_of(sizes);
      CAPTURE(elements);
      return refusal<TestType>(claiming<TestType>(model, type, static_cast<std::byte>(presence), claim),
                               model);
    };
    for (const std::size_t elements : {most / sizeof(TestType) + 2, most / 2 + 2, most}) {
      CHECK(refused({elements}, 1, elements) == errc::bad_payload_size);
      CHECK(refused({elements}, 0, elements) == errc{});
    }
    // Layers whose bytes can be counted, but not their sum.
    const std::size_t half = most / sizeof(TestType) / 2 + 1;
    CHECK(refused({half, half, 1, half, half}, 0b11111, half) == errc::bad_payload_size);
    CHECK(refused({half, half, 1, half, half}, 0b100, half) == errc{});
    // Too large for memory: nothing is allocated for it.
    const std::size_t large = std::size_t{1} << 40;
    const lamina::layout model = model_of({large, large});
    const bytes frame = with_header(claiming<TestType>(model, type, std::byte{0b11}, 8), [&](auto& header) {
      header.payload_bytes = 2 * lamina::payload_bytes<TestType>(type, large);
    });
    CHECK(refusal<TestType>(frame, model) == errc::truncated);
  }
}

TEST_CASE("decoder: bytes at any address are read, but elements where they lie only if aligned") {
  for (const payload_type type : payload_types) {
    const small_frame<double> small(type);
    alignas(64) std::array<std::byte, 64 + 1024> buffer{};
    for (std::size_t shift = 0; shift < 64; ++shift) {
      CAPTURE(shift);
      const auto shifted = std::span(buffer).subspan(shift, small.frame.size());
      std::ranges::copy(small.frame, shifted.begin());
      const bool is_misaligned = type == payload_type::as_is && shift % alignof(double) != 0;
      REQUIRE(refusal<double>(shifted, small.model) == (is_misaligned ? errc::misaligned_buffer : errc{}));
    }
  }
}

TEST_CASE("decoder: output that overlaps the payload is refused and nothing is written") {
  for (const payload_type type : payload_types) {
    const small_frame<float> small(type);
    alignas(64) std::array<std::byte, 1024> buffer{};
    const auto place = std::span(buffer).subspan(64, small.frame.size());
    std::ranges::copy(small.frame, place.begin());
    const auto view = lamina::decode<float>(place, small.model);
    const auto before = buffer;
    for (std::size_t at = 0; at + 12 <= buffer.size(); at += 4) {
      CAPTURE(at);
      const std::span out(reinterpret_cast<float*>(buffer.data() + at), 3);
      if (at < 64 + small.frame.size() && at + 12 > 64 + payload_at) {
        CHECK(contains(message_of<std::invalid_argument>([&] { view.restore(0, out); }), "overlaps"));
        CHECK(contains(message_of<std::invalid_argument>([&] { view.apply_to(0, out); }), "overlaps"));
        CHECK(contains(message_of<std::invalid_argument>([&] { view.copy(0, 0, out); }), "overlaps"));
        CHECK(buffer == before);
      } else {
        view.restore(0, out);
        CHECK(std::ranges::equal(out, small.values[0]));
        buffer = before;
      }
    }
    const std::span dropped(reinterpret_cast<float*>(buffer.data() + 64 + payload_at), 4);
    CHECK_THROWS_AS(view.restore(1, dropped), std::invalid_argument);
    CHECK_NOTHROW(view.restore(3, dropped.first(0)));
  }
}

TEST_CASE("peek: of the first 64 bytes, and a size that cannot be counted is refused") {
  constexpr std::uint64_t most = std::numeric_limits<std::size_t>::max();
  const small_frame<float> small;
  const bytes& frame = small.frame;
  for (std::size_t length = 0; length < lamina::peek_bytes; ++length)
    CHECK(refusal_of_peek(std::span(frame).first(length)) == errc::truncated);
  CHECK(peeked(std::span(frame).first(lamina::peek_bytes)).fingerprint == small.model.fingerprint());
  const auto with = [&](std::uint32_t layers, std::uint64_t payload) {
    return sealed(with_header(frame, [&](wire_header& header) {
      header.layers = layers;
      header.payload_bytes = payload;
    }));
  };
  for (const std::uint32_t number : {0U, 1U, 0x7fffffffU, 0x80000000U, 0xffffffffU}) {
    CAPTURE(number);
    const std::uint64_t bitmap = (number / 8 + (number % 8 != 0) + 63) / 64 * 64;
    CHECK(peeked(with(number, 20)).layers == number);
    CHECK(peeked(with(number, 20)).size_bytes == 64 + bitmap + 20);
    CHECK(peeked(with(number, most - 64 - bitmap)).size_bytes == most);
    CHECK(refusal_of_peek(with(number, most - 63 - bitmap)) == errc::bad_payload_size);
    CHECK(refusal_of_peek(with(number, most)) == errc::bad_payload_size);
  }
}

}  // namespace lamina_test::decoder_test
