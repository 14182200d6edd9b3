// SPDX-License-Identifier: MIT
// Frames made by hand: numbers at the limits of their fields, flipped bits that no checksum covers, models whose bytes
// cannot be counted, and output that lies over the frame.
#include "lamina/codec.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <utility>

#include "catch.hpp"
#include "lamina/frame.hpp"
#include "lamina/server.hpp"
#include "support.hpp"

using lamina::errc;
using lamina::payload_type;
using lamina::detail::wire_header;
using namespace lamina_test;

namespace {

using bytes = std::vector<std::byte>;

constexpr std::array every_type = {payload_type::as_is, payload_type::float16, payload_type::bfloat16,
                                   payload_type::int8, payload_type::int4};
constexpr std::array<std::uint64_t, 9> limits = {
    0, 1, 0x7fffffff, 0x80000000, 0x80000001, 0xffffffff, 0x100000000, 0x8000000000000000, ~std::uint64_t{0}};
constexpr std::size_t bitmap_at = 64;
constexpr std::size_t payload_at = 128;

// Layers 0 and 2 are sent, layer 1 is list [0], layer 3 is empty.
const std::vector<std::size_t> sizes = {3, 4, 66, 0};

template <class T>
bytes frame_of(payload_type type, std::uint64_t step = 7, std::uint32_t sender = 1) {
  const lamina::layout model = model_of(sizes);
  lamina::selection chosen(model);
  chosen.send(0);
  chosen.send(2);
  std::vector<std::vector<T>> values;
  for (const std::size_t size : sizes) values.emplace_back(size, T(1.5));
  lamina::frame_encoder<T> encoder(model);
  const auto layer = [&](std::size_t l) { return std::span<const T>(values[l]); };
  return encoder.encode({.step = step, .sender = sender, .payload = type}, chosen, layer).to_bytes();
}

wire_header header_of(const bytes& frame) {
  return lamina::detail::read_header(frame);
}
void write_header(bytes& frame, const wire_header& header) {
  std::memcpy(frame.data(), &header, sizeof header);
}

// The frame with another header, under a good checksum if it is to have one.
bytes sealed(bytes frame, wire_header header) {
  header.checksum = 0;
  if ((header.flags & lamina::detail::flag_checksum) != 0) {
    write_header(frame, header);
    lamina::detail::checksum sum;
    sum.add(std::span(frame).first(lamina::detail::checksum_offset));
    sum.add(std::span(frame).subspan(bitmap_at));
    header.checksum = sum.value();
  }
  write_header(frame, header);
  return frame;
}
template <class Change>
bytes changed(const bytes& frame, const Change& change) {
  wire_header header = header_of(frame);
  change(header);
  return sealed(frame, header);
}
bytes without_checksum(const bytes& frame) {
  return changed(frame, [](wire_header& header) { header.flags = lamina::detail::flag_last; });
}

template <class T>
std::error_code verdict(std::span<const std::byte> frame, const lamina::layout& model) {
  std::error_code error;
  const auto view = lamina::decode<T>(frame, model, error);
  if (error) {
    REQUIRE(error.category() == lamina::category());
    REQUIRE(view.layers() == 0);
  }
  return error;
}

template <class T>
std::vector<T> elements_of_frame(const lamina::frame_view<T>& view) {
  std::vector<T> all;
  for (std::size_t l = 0; l < view.layers(); ++l) {
    std::vector<T> layer(sizes[l]);
    view.restore(l, layer);
    all.insert(all.end(), layer.begin(), layer.end());
  }
  return all;
}

// A frame of one bitmap byte and no checksum, with a payload of its claimed size.
template <class T>
bytes claiming(const lamina::layout& model, payload_type type, std::byte presence, std::size_t payload) {
  bytes frame(payload_at + payload);
  wire_header header;
  header.element_type = lamina::detail::element_code<T>;
  header.kind = static_cast<std::uint8_t>(lamina::frame_kind::gradients);
  header.fingerprint = model.fingerprint();
  header.layers = static_cast<std::uint32_t>(model.layers());
  header.flags = lamina::detail::flag_last;
  header.payload_bytes = payload;
  header.payload_type = static_cast<std::uint8_t>(type);
  write_header(frame, header);
  frame[bitmap_at] = presence;
  return frame;
}

}  // namespace

TEMPLATE_TEST_CASE("decoder: sizes at the limits of their fields are refused by name", "", float, double) {
  const lamina::layout model = model_of(sizes);
  for (const payload_type type : every_type) {
    const bytes frame = frame_of<TestType>(type);
    REQUIRE_FALSE(verdict<TestType>(frame, model));
    for (const std::uint64_t number : limits) {
      CAPTURE(number);
      const auto refused = [&]<class Field>(Field wire_header::*field) {
        const auto in_place = [&](wire_header& header) { header.*field = static_cast<Field>(number); };
        const auto on_top = [&](wire_header& header) {
          header.*field = static_cast<Field>(header.*field + std::max<Field>(static_cast<Field>(number), 1));
        };
        const std::error_code error = verdict<TestType>(changed(frame, in_place), model);
        CHECK(verdict<TestType>(changed(frame, on_top), model) == error);
        return error;
      };
      CHECK(refused(&wire_header::layers) == errc::wrong_layout);
      CHECK(refused(&wire_header::fingerprint) == errc::wrong_layout);
      CHECK(refused(&wire_header::payload_bytes) == errc::bad_payload_size);
    }
  }
}

TEMPLATE_TEST_CASE("decoder: any step and sender is read, and it is for the receiver to refuse it", "", float,
                   double) {
  const lamina::layout model = model_of(sizes);
  for (const payload_type type : every_type) {
    for (const std::uint64_t number : limits) {
      CAPTURE(number);
      const bytes in_step = frame_of<TestType>(type, number);
      const bytes from = frame_of<TestType>(type, 7, static_cast<std::uint32_t>(number));
      const auto late = lamina::decode<TestType>(in_step, model);
      const auto foreign = lamina::decode<TestType>(from, model);
      CHECK(late.step() == number);
      CHECK(foreign.sender() == static_cast<std::uint32_t>(number));
      lamina::server<TestType> server(model, {.workers = 2, .first_step = 7});
      CHECK(server.add(in_step) == errc::unexpected_step);
      CHECK(server.add(from) == (foreign.sender() < 2 ? std::error_code{} : errc::unknown_sender));
    }
  }
}

TEMPLATE_TEST_CASE("decoder: every unknown flag and impossible number is refused under a good checksum", "",
                   float, double) {
  const lamina::layout model = model_of(sizes);
  for (const payload_type type : every_type) {
    const bytes frame = frame_of<TestType>(type);
    for (unsigned bit = 2; bit < 32; ++bit) {
      const auto flag = [&](wire_header& header) { header.flags |= 1U << bit; };
      REQUIRE(verdict<TestType>(changed(frame, flag), model) == errc::nonzero_reserved);
    }
    const auto user = [](wire_header& header) { header.user_bytes = 65; };
    REQUIRE(verdict<TestType>(changed(frame, user), model) == errc::nonzero_reserved);
    for (unsigned bit = 0; bit < 32; ++bit) {
      const auto reserved = [&](wire_header& header) { header.reserved = 1U << bit; };
      REQUIRE(verdict<TestType>(changed(frame, reserved), model) == errc::nonzero_reserved);
    }
  }
}

// What a bit may change where nothing covers it: the step, the sender, the run, the number of the frame and whether it is
// the last, the user's bytes, the elements, and gradients for parameters, which are 1 and 2 and so two bits apart. No size, and nothing
// of what the model says.
TEMPLATE_TEST_CASE("decoder: without a checksum a flipped bit is refused or changes one thing that was sent",
                   "", float, double) {
  const lamina::layout model = model_of(sizes);
  for (const payload_type type : every_type) {
    bytes frame = without_checksum(frame_of<TestType>(type));
    const std::vector<TestType> sent = elements_of_frame(lamina::decode<TestType>(frame, model));
    for (std::size_t bit = 0; bit < 8 * frame.size(); ++bit) {
      CAPTURE(bit);
      const std::size_t place = bit / 8;
      const std::byte mask = std::byte{1} << (bit % 8);
      frame[place] ^= mask;
      std::error_code error;
      const auto view = lamina::decode<TestType>(frame, model, error);
      const bool is_sender = place >= 12 && place < 16;
      const bool is_step = place >= 16 && place < 24;
      const bool is_run = place >= 48 && place < 52;
      const bool is_sequence = place == 36 || place == 37;
      const bool is_last = bit == 8 * 8 + 1;
      const bool is_user = place == 39 && bit % 8 < 6;  // zeros that were padding, which are fewer than 64
      const bool is_element = place >= payload_at;
      // Layer 0 has three elements; the upper half of its second byte of int4 is nobody's.
      const bool is_nobodys = type == payload_type::int4 && place == payload_at + 2 && bit % 8 >= 4;
      REQUIRE(!error == (is_sender || is_step || is_run || is_sequence || is_last || is_user || is_element));
      if (error) {
        REQUIRE(error.category() == lamina::category());
        REQUIRE(view.layers() == 0);
      } else {
        REQUIRE((view.sender() != 1) == is_sender);
        REQUIRE((view.step() != 7) == is_step);
        REQUIRE((view.run() != 0) == is_run);
        REQUIRE((view.sequence() != 0) == is_sequence);
        REQUIRE(view.is_last() != is_last);
        REQUIRE(view.user().empty() != is_user);
        REQUIRE(same_bits(elements_of_frame(view), sent) != (is_element && !is_nobodys));
        REQUIRE(view.is_dropped(1));
      }
      frame[place] ^= mask;
    }
  }
}

TEMPLATE_TEST_CASE("decoder: of a model whose bytes cannot be counted, no frame has those layers", "", float,
                   double) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  const auto bytes_of = [](payload_type type, std::size_t elements) {
    return lamina::payload_bytes<TestType>(type, elements);  // wraps around
  };
  for (const payload_type type : every_type) {
    // One layer whose bytes wrap around to a few.
    for (const std::size_t elements : {most / sizeof(TestType) + 2, most / 2 + 2, most}) {
      const lamina::layout model = model_of({elements});
      CAPTURE(elements);
      const std::size_t wrapped = bytes_of(type, elements);
      const std::size_t claim = wrapped < 1000 ? wrapped : 0;
      CHECK(verdict<TestType>(claiming<TestType>(model, type, std::byte{1}, claim), model) ==
            errc::bad_payload_size);
      CHECK_FALSE(verdict<TestType>(claiming<TestType>(model, type, std::byte{0}, 0), model));
    }
    // Layers whose bytes can be counted, but not their sum.
    const std::size_t half = most / sizeof(TestType) / 2 + 1;
    const lamina::layout model = model_of({half, half, 1, half, half});
    const std::size_t wrapped = 4 * bytes_of(type, half) + bytes_of(type, 1);
    const std::size_t claim = wrapped < 1000 ? wrapped : 0;
    CHECK(verdict<TestType>(claiming<TestType>(model, type, std::byte{0b11111}, claim), model) ==
          errc::bad_payload_size);
    CHECK_FALSE(
        verdict<TestType>(claiming<TestType>(model, type, std::byte{0b100}, bytes_of(type, 1)), model));
  }
}

TEST_CASE("decoder: what is too large for memory is refused as truncated, and nothing is allocated for it") {
  const lamina::layout model = model_of({std::size_t{1} << 40, std::size_t{1} << 40});
  for (const payload_type type : every_type) {
    bytes frame = claiming<float>(model, type, std::byte{0b11}, 8);
    wire_header header = header_of(frame);
    header.payload_bytes = 2 * lamina::payload_bytes<float>(type, std::size_t{1} << 40);
    CHECK(verdict<float>(sealed(frame, header), model) == errc::truncated);
  }
}

TEMPLATE_TEST_CASE("decoder: output that overlaps the payload is refused and nothing is written", "", float,
                   double) {
  const lamina::layout model = model_of(sizes);
  for (const payload_type type : every_type) {
    const bytes frame = frame_of<TestType>(type);
    // Room before and behind for a layer of 3 elements.
    constexpr std::size_t room = 64;
    alignas(64) std::array<std::byte, 1024> buffer{};
    const auto place = std::span(buffer).subspan(room, frame.size());
    std::ranges::copy(frame, place.begin());
    const auto view = lamina::decode<TestType>(place, model);
    const std::size_t payload_begin = room + payload_at;
    const std::size_t payload_end = room + frame.size();
    for (std::size_t at = 0; at + 3 * sizeof(TestType) <= buffer.size(); at += sizeof(TestType)) {
      CAPTURE(at);
      const std::span out(reinterpret_cast<TestType*>(buffer.data() + at), 3);
      const auto before = buffer;
      const bool overlaps = at < payload_end && at + out.size_bytes() > payload_begin;
      if (overlaps) {
        CHECK(contains(message_of<std::invalid_argument>([&] { view.restore(0, out); }), "overlaps"));
        CHECK(contains(message_of<std::invalid_argument>([&] { view.apply_to(0, out); }), "overlaps"));
        CHECK(contains(message_of<std::invalid_argument>([&] { view.copy(0, 0, out); }), "overlaps"));
        CHECK(buffer == before);
      } else {
        view.restore(0, out);
        CHECK(std::ranges::all_of(out, [](TestType each) { return each == TestType(1.5); }));
        buffer = before;
      }
    }
    const std::span dropped(reinterpret_cast<TestType*>(buffer.data() + payload_begin), 4);
    CHECK_THROWS_AS(view.restore(1, dropped), std::invalid_argument);
    CHECK_THROWS_AS(view.apply_to(1, dropped), std::invalid_argument);
    CHECK_NOTHROW(view.restore(3, dropped.first(0)));
  }
}

namespace {

// It gives nothing on error.
std::error_code verdict_of_peek(std::span<const std::byte> first_bytes) {
  std::error_code error = make_error_code(errc::bad_magic);
  const lamina::frame_info info = lamina::peek(first_bytes, error);
  if (error) CHECK(info == lamina::frame_info{});
  return error;
}
lamina::frame_info peeked(std::span<const std::byte> first_bytes) {
  std::error_code error;
  const lamina::frame_info info = lamina::peek(first_bytes, error);
  REQUIRE_FALSE(error);
  return info;
}

}  // namespace

TEMPLATE_TEST_CASE("peek: the first 64 bytes tell the frame's size and what it says of itself", "", float,
                   double) {
  const lamina::layout model = model_of(sizes);
  for (const payload_type type : every_type) {
    bytes frame = frame_of<TestType>(type, 77, 5);
    for (const auto kind : {lamina::frame_kind::gradients, lamina::frame_kind::parameters}) {
      frame = changed(frame, [&](wire_header& header) {
        header.kind = static_cast<std::uint8_t>(kind);
        header.run = 9;
      });
      const lamina::frame_info expected = {.size_bytes = frame.size(),
                                           .kind = kind,
                                           .payload = type,
                                           .element_bytes = sizeof(TestType),
                                           .sender = 5,
                                           .run = 9,
                                           .step = 77,
                                           .fingerprint = model.fingerprint(),
                                           .layers = 4,
                                           .is_last = true};
      CHECK(peeked(std::span(frame).first(lamina::peek_bytes)) == expected);
      CHECK(peeked(frame) == expected);
      CHECK_FALSE(verdict_of_peek(frame));
      for (std::size_t length = 0; length < lamina::peek_bytes; ++length) {
        CHECK(verdict_of_peek(std::span(frame).first(length)) == errc::truncated);
      }
    }
  }
}

TEST_CASE("peek: refuses a header as decode does, and knows nothing of the layout") {
  const lamina::layout model = model_of(sizes);
  const bytes frame = frame_of<float>(payload_type::as_is);
  for (std::size_t bit = 0; bit < 8 * lamina::peek_bytes; ++bit) {
    CAPTURE(bit);
    bytes damaged = frame;
    damaged[bit / 8] ^= std::byte{1} << (bit % 8);
    const std::error_code refusal = verdict_of_peek(damaged);
    const std::error_code decoded = verdict<float>(damaged, model);
    if (refusal) {
      CHECK(refusal == decoded);
    } else {
      const lamina::frame_info info = peeked(damaged);
      CHECK((decoded || info.size_bytes == frame.size()));
    }
    if (bit / 8 == 6) CHECK(refusal == errc::wrong_element_type);  // 1 and 2 are two bits apart
  }
  const bytes doubles = frame_of<double>(payload_type::as_is);
  CHECK_FALSE(verdict_of_peek(doubles));
  CHECK(verdict<float>(doubles, model) == errc::wrong_element_type);
}

TEST_CASE("peek: a size that cannot be counted is refused") {
  const bytes frame = frame_of<float>(payload_type::as_is);
  constexpr std::uint64_t most = std::numeric_limits<std::size_t>::max();
  const auto with = [&](std::uint32_t layers, std::uint64_t payload) {
    return changed(frame, [&](wire_header& header) {
      header.layers = layers;
      header.payload_bytes = payload;
    });
  };
  for (const std::uint32_t number : {0U, 1U, 0x7fffffffU, 0x80000000U, 0xffffffffU}) {
    CAPTURE(number);
    const bytes many_layers = with(number, 20);
    const std::uint64_t bitmap = (number / 8 + (number % 8 != 0) + 63) / 64 * 64;
    CHECK_FALSE(verdict_of_peek(many_layers));
    CHECK(peeked(many_layers).layers == number);
    CHECK(peeked(many_layers).size_bytes == 64 + bitmap + 20);
    CHECK(peeked(with(number, most - 64 - bitmap)).size_bytes == most);
    CHECK(verdict_of_peek(with(number, most - 63 - bitmap)) == errc::bad_payload_size);
    CHECK(verdict_of_peek(with(number, most)) == errc::bad_payload_size);
  }
}
