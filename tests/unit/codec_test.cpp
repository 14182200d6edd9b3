// SPDX-License-Identifier: MIT
#include "lamina/codec.hpp"

#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>

#include "catch.hpp"
#include "lamina/layout.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::errc;

namespace {

using bytes = std::vector<std::byte>;

// Where the fields of the header lie, written down a second time on purpose.
enum field : std::size_t {
  magic = 0,
  version = 4,
  element_type = 6,
  kind = 7,
  flags = 8,
  sender = 12,
  step = 16,
  fingerprint = 24,
  layer_count = 32,
  sequence = 36,
  payload_kind = 38,
  user_bytes = 39,
  payload_bytes = 40,
  run = 48,
  reserved = 52,
  checksum = 56,
  bitmap = 64
};

template <class T>
using tensors = std::vector<std::vector<T>>;

template <class T>
tensors<T> random_tensors(std::mt19937& random, const lamina::layout& model) {
  tensors<T> values;
  for (const std::size_t size : model.sizes()) values.push_back(random_fractions<T>(random, size));
  return values;
}

template <class T>
bytes encode(const lamina::layout& model, const lamina::selection& chosen, const tensors<T>& values,
             std::uint64_t in_step = 1, std::uint32_t from = 0,
             lamina::frame_kind of_kind = lamina::frame_kind::gradients) {
  lamina::frame_encoder<T> encoder(model);
  const auto layer = [&](std::size_t l) { return std::span<const T>(values[l]); };
  return encoder.encode({.kind = of_kind, .step = in_step, .sender = from}, chosen, layer).to_bytes();
}

template <class Number>
Number read(const bytes& frame, std::size_t at) {
  Number number;
  std::memcpy(&number, frame.data() + at, sizeof number);
  return number;
}

template <class Number>
bytes patched(bytes frame, std::size_t at, Number number) {
  std::memcpy(frame.data() + at, &number, sizeof number);
  return frame;
}

// Whether decode, with an error code or without, takes what a caller gives as this type.
template <class Given, class... Error>
constexpr bool decodes = requires(Given&& given, const lamina::layout& model, Error&... error) {
  lamina::decode<float>(std::forward<Given>(given), model, error...);
};

// The checksum made good again after a patch, by xxHash's one-shot function.
std::uint64_t checksum_of(const bytes& frame) {
  bytes covered(frame.begin(), frame.begin() + checksum);
  covered.insert(covered.end(), frame.begin() + bitmap, frame.end());
  return XXH3_64bits(covered.data(), covered.size());
}
bytes resealed(bytes frame) {
  return patched(frame, checksum, checksum_of(frame));
}

// What both forms of decode say; they must agree, and give no layers on error.
template <class T>
std::error_code verdict(std::span<const std::byte> frame, const lamina::layout& model) {
  std::error_code quiet = make_error_code(errc::bad_magic);
  const auto view = lamina::decode<T>(frame, model, quiet);
  if (quiet) {
    REQUIRE(view.layers() == 0);
    REQUIRE(view.sent_elements() == 0);
  }
  try {
    const auto loud = lamina::decode<T>(frame, model);
    REQUIRE_FALSE(quiet);
    REQUIRE(loud.layers() == view.layers());
  } catch (const lamina::decode_error& error) {
    REQUIRE(error.code() == quiet);
    REQUIRE(contains(error.what(), quiet.message()));
  }
  return quiet;
}

lamina::selection everything(const lamina::layout& model) {
  lamina::selection chosen(model);
  for (std::size_t l = 0; l < model.layers(); ++l) chosen.send(l);
  return chosen;
}

// 3 layers, the middle one dropped: a frame of 64 + 64 + 20 (or 40) bytes.
template <class T>
struct small_frame {
  lamina::layout model = model_of({3, 4, 2, 0});
  tensors<T> values = {{1, 2, 3}, {9, 9, 9, 9}, {4, 5}, {}};
  lamina::selection chosen{model};
  bytes frame;
  small_frame() {
    chosen.send(0);
    chosen.send(2);
    frame = encode(model, chosen, values, 7, 3);
  }
};

}  // namespace

TEMPLATE_TEST_CASE("codec: random selections come back bit for bit", "", float, double) {
  for (std::uint32_t seed = 41; seed < 141; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    const auto values = random_tensors<TestType>(random, model);
    lamina::selection chosen(model);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (random() % 2 == 0) chosen.send(l);
    }
    const auto of_kind = random() % 2 == 0 ? lamina::frame_kind::gradients : lamina::frame_kind::parameters;
    const bytes frame = encode(model, chosen, values, seed * 10000000000U, seed, of_kind);
    const auto view = lamina::decode<TestType>(frame, model);
    REQUIRE(view.kind() == of_kind);
    REQUIRE(view.step() == seed * 10000000000U);
    REQUIRE(view.sender() == seed);
    REQUIRE(view.layers() == model.layers());
    REQUIRE(view.sent_elements() == chosen.sent_elements());
    REQUIRE(view.is_of(model));
    for (std::size_t l = 0; l < model.layers(); ++l) {
      REQUIRE(view.is_dropped(l) == chosen.is_dropped(l));
      REQUIRE(same_bits(view.layer(l), chosen.is_sent(l) ? values[l] : std::vector<TestType>{}));
      std::vector<TestType> out(model.sizes()[l], TestType(77));
      REQUIRE(view.apply_to(l, out) == chosen.is_sent(l));
      REQUIRE(
          same_bits(out, chosen.is_sent(l) ? values[l] : std::vector<TestType>(out.size(), TestType(77))));
      if (of_kind == lamina::frame_kind::parameters) continue;
      view.restore(l, out);
      REQUIRE(same_bits(out, chosen.is_sent(l) ? values[l] : std::vector<TestType>(out.size())));
    }
  }
}

TEMPLATE_TEST_CASE("codec: 64 bytes of header, the bitmap padded to 64, the payload, nothing else", "", float,
                   double) {
  for (const std::size_t layers : {0, 1, 8, 9, 161, 511, 512, 513, 1024, 1025}) {
    CAPTURE(layers);
    const lamina::layout model = model_of(std::vector<std::size_t>(layers, 3));
    const std::size_t bitmap_bytes = (layers + 511) / 512 * 64;
    const tensors<TestType> values(layers, std::vector<TestType>(3, TestType(1)));
    lamina::selection chosen(model);
    REQUIRE(encode(model, chosen, values).size() == 64 + bitmap_bytes);
    for (std::size_t l = 0; l < layers; l += 2) chosen.send(l);
    const bytes frame = encode(model, chosen, values);
    REQUIRE(frame.size() == 64 + bitmap_bytes + chosen.sent_elements() * sizeof(TestType));
    for (std::size_t l = 0; l < bitmap_bytes * 8; ++l) {
      const bool bit = ((frame[bitmap + l / 8] >> (l % 8)) & std::byte{1}) != std::byte{0};
      REQUIRE(bit == (l < layers && l % 2 == 0));
    }
    REQUIRE(lamina::decode<TestType>(frame, model).layers() == layers);
  }
}

TEMPLATE_TEST_CASE("codec: the header's fields stand where the format says", "", float, double) {
  const small_frame<TestType> small;
  const bytes& frame = small.frame;
  CHECK(frame[0] == std::byte{0xf4});
  CHECK(std::memcmp(frame.data() + 1, "LAM", 3) == 0);
  CHECK(read<std::uint16_t>(frame, version) == 2);
  CHECK(read<std::uint8_t>(frame, element_type) == (sizeof(TestType) == 4 ? 1 : 2));
  CHECK(read<std::uint8_t>(frame, kind) == 1);
  CHECK(read<std::uint32_t>(frame, flags) == 3U);
  CHECK(read<std::uint32_t>(frame, sender) == 3);
  CHECK(read<std::uint64_t>(frame, step) == 7);
  CHECK(read<std::uint64_t>(frame, fingerprint) == small.model.fingerprint());
  CHECK(read<std::uint32_t>(frame, layer_count) == 4);
  CHECK(read<std::uint64_t>(frame, payload_bytes) == 5 * sizeof(TestType));
  CHECK(read<std::uint32_t>(frame, sequence) == 0);  // with payload_kind and user_bytes
  CHECK(read<std::uint32_t>(frame, reserved) == 0);
  CHECK(read<std::uint32_t>(frame, run) == 0);
  CHECK(read<std::uint64_t>(frame, checksum) == checksum_of(frame));
  CHECK(read<std::uint8_t>(frame, bitmap) == 0b101);
  CHECK(read<TestType>(frame, 128) == 1);
  CHECK(read<TestType>(frame, 128 + 4 * sizeof(TestType)) == 5);
}

TEMPLATE_TEST_CASE("codec: the segments are the header and then the layers where they lie", "", float,
                   double) {
  std::mt19937 random(42);
  const lamina::layout model = random_model(random);
  const auto values = random_tensors<TestType>(random, model);
  const lamina::selection chosen = everything(model);
  lamina::frame_encoder<TestType> encoder(model);
  std::vector<std::size_t> asked;
  const auto& frame = encoder.encode(
      {}, chosen, [&](std::size_t l) -> const auto& {
        asked.push_back(l);
        return values[l];
      });
  const auto segments = frame.segments();
  REQUIRE(segments.size() == 1 + chosen.sent_layers());
  REQUIRE(asked.size() == chosen.sent_layers());
  REQUIRE(std::ranges::is_sorted(asked));
  bytes joined(segments[0].begin(), segments[0].end());
  for (std::size_t s = 1; s < segments.size(); ++s) {
    REQUIRE(segments[s].data() == reinterpret_cast<const std::byte*>(values[asked[s - 1]].data()));
    REQUIRE(segments[s].size() == values[asked[s - 1]].size() * sizeof(TestType));
    joined.insert(joined.end(), segments[s].begin(), segments[s].end());
  }
  CHECK(joined == frame.to_bytes());
  CHECK(frame.size_bytes() == joined.size());
  bytes copy(frame.size_bytes());
  frame.copy_to(copy);
  CHECK(copy == joined);
}

TEST_CASE("codec: copy_to refuses a buffer of another size, with both sizes, and leaves it alone") {
  const lamina::layout model = model_of({2});
  const std::vector<float> values = {1, 2};
  lamina::frame_encoder<float> encoder(model);
  const auto& frame = encoder.encode(
      {}, everything(model), [&](std::size_t) -> const auto& { return values; });
  for (const std::size_t size : {0, 135, 137, 1000}) {
    bytes buffer(size, std::byte{0x55});
    const std::string message = message_of<std::invalid_argument>([&] { frame.copy_to(buffer); });
    CHECK(contains(message, "136 bytes"));
    CHECK(contains(message, std::to_string(size)));
    CHECK(buffer == bytes(size, std::byte{0x55}));
  }
}

TEMPLATE_TEST_CASE("codec: an encoder is as good as new for every frame", "", float, double) {
  std::mt19937 random(43);
  const lamina::layout model = random_model(random);
  lamina::frame_encoder<TestType> encoder(model);
  for (std::uint64_t in_step = 1; in_step <= 20; ++in_step) {
    const auto values = random_tensors<TestType>(random, model);
    lamina::selection chosen(model);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (random() % 2 == 0) chosen.send(l);
    }
    const auto& frame = encoder.encode(
        {.step = in_step, .sender = 1}, chosen, [&](std::size_t l) -> const auto& { return values[l]; });
    REQUIRE(frame.to_bytes() == encode(model, chosen, values, in_step, 1));
  }
}

TEMPLATE_TEST_CASE("codec: every truncation is refused as truncated", "", float, double) {
  const small_frame<TestType> small;
  REQUIRE_FALSE(verdict<TestType>(small.frame, small.model));
  for (std::size_t length = 0; length < small.frame.size(); ++length) {
    CAPTURE(length);
    const bytes shorter(small.frame.begin(), small.frame.begin() + static_cast<std::ptrdiff_t>(length));
    REQUIRE(verdict<TestType>(shorter, small.model) == errc::truncated);
  }
}

TEMPLATE_TEST_CASE("codec: trailing bytes are refused", "", float, double) {
  const small_frame<TestType> small;
  for (const std::size_t more : {1, 4, 64, 1000}) {
    bytes longer = small.frame;
    longer.resize(longer.size() + more);
    REQUIRE(verdict<TestType>(longer, small.model) == errc::trailing_bytes);
    REQUIRE(verdict<TestType>(resealed(longer), small.model) == errc::trailing_bytes);
  }
}

TEMPLATE_TEST_CASE("codec: every flipped bit is noticed", "", float, double) {
  const small_frame<TestType> small;
  bytes damaged = small.frame;
  for (std::size_t bit = 0; bit < damaged.size() * 8; ++bit) {
    CAPTURE(bit);
    damaged[bit / 8] ^= std::byte{1} << (bit % 8);
    REQUIRE(verdict<TestType>(damaged, small.model));
    damaged[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  REQUIRE_FALSE(verdict<TestType>(damaged, small.model));
}

TEMPLATE_TEST_CASE("codec: damage in what only the checksum covers is a checksum mismatch", "", float,
                   double) {
  const small_frame<TestType> small;
  for (const std::size_t at : {std::size_t{sender}, std::size_t{step}, std::size_t{run},
                               std::size_t{checksum}, std::size_t{128}, small.frame.size() - 1}) {
    const bytes damaged = patched(small.frame, at, std::uint8_t(read<std::uint8_t>(small.frame, at) ^ 0x40));
    CHECK(verdict<TestType>(damaged, small.model) == errc::checksum_mismatch);
  }
  // Two layers of one size change places in the bitmap: every size still fits.
  const lamina::layout model = model_of({2, 2});
  lamina::selection chosen(model);
  chosen.send(0);
  const bytes first = encode<TestType>(model, chosen, {{1, 2}, {3, 4}});
  const bytes moved = patched(first, bitmap, std::uint8_t{0b10});
  CHECK(verdict<TestType>(moved, model) == errc::checksum_mismatch);
  CHECK_FALSE(verdict<TestType>(resealed(moved), model));
}

TEMPLATE_TEST_CASE("codec: each field of the header is checked by name", "", float, double) {
  const small_frame<TestType> small;
  const auto refused = [&](std::size_t at, auto number) {
    const bytes bad = patched(small.frame, at, number);
    const std::error_code as_is = verdict<TestType>(bad, small.model);
    REQUIRE(verdict<TestType>(resealed(bad), small.model) == as_is);  // not by the checksum alone
    return as_is;
  };
  const std::uint8_t other_type = sizeof(TestType) == 4 ? 2 : 1;
  CHECK(refused(magic, std::uint32_t{0}) == errc::bad_magic);
  CHECK(refused(magic, std::uint32_t{0x4d414cf5}) == errc::bad_magic);
  CHECK(refused(magic, std::uint32_t{0xf44c414d}) == errc::bad_magic);  // another byte order
  for (const int number : {0, 1, 3, 256, 65535}) {
    CHECK(refused(version, static_cast<std::uint16_t>(number)) == errc::unsupported_version);
  }
  for (const std::uint8_t number : {std::uint8_t{0}, other_type, std::uint8_t{3}, std::uint8_t{255}}) {
    CHECK(refused(element_type, number) == errc::wrong_element_type);
  }
  for (const int number : {0, 3, 5, 255}) {
    CHECK(refused(kind, static_cast<std::uint8_t>(number)) == errc::unknown_kind);
  }
  for (const std::uint32_t number : {4U, 5U, 8U, 0x80000001U}) {
    CHECK(refused(flags, number) == errc::nonzero_reserved);
  }
  CHECK(refused(payload_kind, std::uint8_t{1}) == errc::bad_payload_size);  // float16, of another size
  for (const int number : {5, 255}) {
    CHECK(refused(payload_kind, static_cast<std::uint8_t>(number)) == errc::unknown_payload_type);
  }
  for (const int number : {65, 255}) {
    CHECK(refused(user_bytes, static_cast<std::uint8_t>(number)) == errc::nonzero_reserved);
  }
  CHECK(refused(reserved, std::uint32_t{8}) == errc::nonzero_reserved);
  CHECK(refused(fingerprint, small.model.fingerprint() + 1) == errc::wrong_layout);
  for (const std::uint32_t number : {0U, 3U, 5U, ~0U}) {
    CHECK(refused(layer_count, number) == errc::wrong_layout);
  }
  const std::uint64_t right = 5 * sizeof(TestType);
  for (const std::uint64_t number : {std::uint64_t{0}, right - 1, right + 1, right + sizeof(TestType),
                                     right + (std::uint64_t{1} << 32), ~std::uint64_t{0}}) {
    CHECK(refused(payload_bytes, number) == errc::bad_payload_size);
  }
  CHECK(refused(bitmap, std::uint8_t{0b111}) == errc::bad_payload_size);
  CHECK(refused(bitmap, std::uint8_t{0b001}) == errc::bad_payload_size);
  CHECK(refused(bitmap, std::uint8_t{0b1101}) == errc::bad_presence);   // the empty layer
  CHECK(refused(bitmap, std::uint8_t{0b10101}) == errc::bad_presence);  // beyond the last layer
  CHECK(refused(bitmap + 1, std::uint8_t{1}) == errc::bad_presence);
  CHECK(refused(bitmap + 63, std::uint8_t{0x80}) == errc::bad_presence);
}

TEMPLATE_TEST_CASE("codec: a payload claim that matches the presence but not the bytes is truncated", "",
                   float, double) {
  const small_frame<TestType> small;
  const bytes more_present = patched(patched(small.frame, bitmap, std::uint8_t{0b111}), payload_bytes,
                                     std::uint64_t{9 * sizeof(TestType)});
  CHECK(verdict<TestType>(resealed(more_present), small.model) == errc::truncated);
  const bytes less_present = patched(patched(small.frame, bitmap, std::uint8_t{0b001}), payload_bytes,
                                     std::uint64_t{3 * sizeof(TestType)});
  CHECK(verdict<TestType>(resealed(less_present), small.model) == errc::trailing_bytes);
}

TEMPLATE_TEST_CASE("codec: a frame may go without a checksum, but then the field is zero", "", float,
                   double) {
  const small_frame<TestType> small;
  const bytes bare =
      patched(patched(small.frame, flags, lamina::detail::flag_last), checksum, std::uint64_t{0});
  CHECK_FALSE(verdict<TestType>(bare, small.model));
  CHECK(verdict<TestType>(patched(bare, checksum, std::uint64_t{1}), small.model) == errc::checksum_mismatch);
}

TEST_CASE("codec: the frame of one element type is refused as the other") {
  const small_frame<float> single;
  const small_frame<double> twice;
  CHECK(verdict<double>(single.frame, single.model) == errc::wrong_element_type);
  CHECK(verdict<float>(twice.frame, twice.model) == errc::wrong_element_type);
}

TEMPLATE_TEST_CASE("codec: the frame of another model is refused", "", float, double) {
  const small_frame<TestType> small;
  const lamina::layout renamed({{"layer0", {3}}, {"layer1", {4}}, {"other", {2}}, {"layer3", {0}}});
  const lamina::layout reshaped({{"layer0", {3, 1}}, {"layer1", {4}}, {"layer2", {2}}, {"layer3", {0}}});
  CHECK(verdict<TestType>(small.frame, renamed) == errc::wrong_layout);
  CHECK(verdict<TestType>(small.frame, reshaped) == errc::wrong_layout);
  CHECK(verdict<TestType>(small.frame, model_of({3, 4})) == errc::wrong_layout);
  CHECK(verdict<TestType>(small.frame, model_of({})) == errc::wrong_layout);
  CHECK_FALSE(verdict<TestType>(small.frame, model_of({3, 4, 2, 0})));  // equal, though another object
}

TEMPLATE_TEST_CASE("codec: a buffer that is not aligned for the element is refused", "", float, double) {
  const small_frame<TestType> small;
  alignas(64) std::array<std::byte, 1024> buffer{};
  for (std::size_t shift = 0; shift < 64; ++shift) {
    CAPTURE(shift);
    std::ranges::copy(small.frame, buffer.begin() + static_cast<std::ptrdiff_t>(shift));
    const std::error_code error =
        verdict<TestType>(std::span(buffer).subspan(shift, small.frame.size()), small.model);
    REQUIRE(error ==
            (shift % alignof(TestType) == 0 ? std::error_code{} : make_error_code(errc::misaligned_buffer)));
  }
}

TEMPLATE_TEST_CASE("codec: decoded layers point into the bytes", "", float, double) {
  const small_frame<TestType> small;
  const auto view = lamina::decode<TestType>(small.frame, small.model);
  CHECK(reinterpret_cast<const std::byte*>(view.layer(0).data()) == small.frame.data() + 128);
  CHECK(view.layer(2).data() == view.layer(0).data() + 3);
  CHECK(view.layer(1).empty());
}

TEMPLATE_TEST_CASE("codec: restore refuses a wrong size or layer and writes nothing", "", float, double) {
  const small_frame<TestType> small;
  const auto view = lamina::decode<TestType>(small.frame, small.model);
  for (const std::size_t wrong : {0, 2, 5}) {
    for (const std::size_t l : {0, 1}) {
      std::vector<TestType> out(wrong, TestType(5));
      const std::string message = message_of<std::invalid_argument>([&] { view.restore(l, out); });
      CHECK(contains(message, "layer" + std::to_string(l)));
      CHECK(contains(message, std::to_string(wrong) + " elements"));
      CHECK(contains(message, l == 0 ? "3 elements" : "4 elements"));
      CHECK(out == std::vector<TestType>(wrong, TestType(5)));
    }
  }
  std::vector<TestType> out(3, TestType(5));
  CHECK_THROWS_AS(view.restore(4, out), std::out_of_range);
  CHECK_THROWS_AS(view.is_dropped(4), std::out_of_range);
  CHECK_THROWS_AS(view.layer(4), std::out_of_range);
  CHECK(out == std::vector<TestType>(3, TestType(5)));
  view.restore(0, std::span(out));
  CHECK(out == std::vector<TestType>{1, 2, 3});
}

TEMPLATE_TEST_CASE("codec: apply_to overwrites what was sent and leaves the rest", "", float, double) {
  const small_frame<TestType> small;
  using layer = std::vector<TestType>;
  for (const auto of_kind : {lamina::frame_kind::gradients, lamina::frame_kind::parameters}) {
    const bytes frame = encode(small.model, small.chosen, small.values, 7, 3, of_kind);
    const auto view = lamina::decode<TestType>(frame, small.model);
    layer first(3, TestType(5));
    layer held_back(4, TestType(5));
    layer last(2, TestType(5));
    layer empty;
    CHECK(view.apply_to(0, first));
    CHECK_FALSE(view.apply_to(1, held_back));
    CHECK(view.apply_to(2, std::span(last)));
    CHECK_FALSE(view.apply_to(3, empty));
    CHECK(first == layer{1, 2, 3});
    CHECK(held_back == layer(4, TestType(5)));
    CHECK(last == layer{4, 5});
    // Looked at before anything is written, and for a layer that is held back too.
    for (const std::size_t l : {0, 1}) {
      layer wrong(5, TestType(5));
      CHECK(contains(message_of<std::invalid_argument>([&] { view.apply_to(l, wrong); }),
                     "layer" + std::to_string(l)));
      CHECK(wrong == layer(5, TestType(5)));
    }
    CHECK_THROWS_AS(view.apply_to(4, first), std::out_of_range);
  }
}

TEMPLATE_TEST_CASE("codec: restore refuses a frame of parameters, whose held layers are to be kept", "",
                   float, double) {
  const small_frame<TestType> small;
  const bytes frame = encode(small.model, small.chosen, small.values, 7, 0, lamina::frame_kind::parameters);
  const auto view = lamina::decode<TestType>(frame, small.model);
  for (std::size_t l = 0; l < 4; ++l) {
    std::vector<TestType> out(small.model.sizes()[l], TestType(5));
    CHECK(contains(message_of<std::logic_error>([&] { view.restore(l, out); }), "apply_to"));
    CHECK(out == std::vector<TestType>(out.size(), TestType(5)));
  }
  std::vector<TestType> out(3);
  CHECK_THROWS_AS(view.restore(4, out), std::out_of_range);
}

TEMPLATE_TEST_CASE("codec: of a frame that arrived in part restore writes what did, and nothing else", "",
                   float, double) {
  const lamina::layout model = model_of({200, 7, 130});
  const tensors<TestType> values = {std::vector<TestType>(200, 3), std::vector<TestType>(7, 4),
                                    std::vector<TestType>(130, 5)};
  lamina::selection chosen(model);
  chosen.send(0);
  chosen.send(2);
  lamina::delivery arrived(chosen, 64);
  arrived.lose(0, 1);
  arrived.lose(2, 0);
  arrived.lose(2, 2);
  lamina::frame_encoder<TestType> encoder(model);
  for (const auto kind : {lamina::frame_kind::gradients, lamina::frame_kind::parameters}) {
    for (const auto payload :
         {lamina::payload_type::as_is, lamina::payload_type::float16, lamina::payload_type::bfloat16,
          lamina::payload_type::int8, lamina::payload_type::int4}) {
      const bytes frame = encoder
                              .encode(
                                  {.kind = kind, .payload = payload},
                                  chosen, [&](std::size_t l) -> const auto& { return values[l]; })
                              .to_bytes();
      const auto view = lamina::decode<TestType>(frame, model);
      tensors<TestType> out;
      for (std::size_t l = 0; l < 3; ++l) {
        out.emplace_back(model.sizes()[l], TestType(9));
        view.restore(l, out[l], arrived);
      }
      for (std::size_t i = 0; i < 200; ++i) REQUIRE(out[0][i] == (i / 64 == 1 ? 9 : 3));
      for (std::size_t i = 0; i < 130; ++i) REQUIRE(out[2][i] == (i / 64 == 1 ? 5 : 9));
      CHECK(out[1] == std::vector<TestType>(7, TestType(9)));

      // Refused before anything is written.
      std::vector<TestType> first(200, TestType(9));
      const auto refuses = [&](const lamina::delivery& other, auto& to) {
        const bool threw = throws<std::invalid_argument>([&] { view.restore(0, to, other); });
        return threw && to == std::vector<TestType>(to.size(), TestType(9));
      };
      CHECK(refuses(lamina::delivery(lamina::selection(model), 64), first));
      CHECK(refuses(lamina::delivery(everything(model_of({200, 7, 131})), 64), first));
      CHECK(refuses(lamina::delivery(chosen, 48), first) == lamina::has_blocks(payload));
      std::vector<TestType> short_by_one(199, TestType(9));
      CHECK(refuses(arrived, short_by_one));
      CHECK_THROWS_AS(view.restore(3, first, arrived), std::out_of_range);
      CHECK_THROWS_AS(lamina::frame_view<TestType>().restore(0, first, arrived), std::out_of_range);
    }
  }
}

TEMPLATE_TEST_CASE("codec: an encoder writes no checksum where it is told so, and the next frame has one", "",
                   float, double) {
  const small_frame<TestType> small;
  lamina::frame_encoder<TestType> encoder(small.model);
  const auto layer = [&](std::size_t l) -> const auto& {
    return small.values[l];
  };
  const auto encoded = [&](lamina::frame_checksum which) {
    return encoder.encode({.step = 7, .sender = 3, .checksum = which}, small.chosen, layer).to_bytes();
  };
  const bytes bare =
      patched(patched(small.frame, flags, lamina::detail::flag_last), checksum, std::uint64_t{0});
  CHECK(encoded(lamina::frame_checksum::none) == bare);
  CHECK_FALSE(verdict<TestType>(bare, small.model));
  CHECK(encoded(lamina::frame_checksum::xxh3) == small.frame);
}

TEST_CASE("codec: bytes that are gone when decode returns do not compile; none at all are truncated") {
  std::error_code error;
  const lamina::layout model = model_of({1});
  CHECK(lamina::decode<float>({}, model, error).layers() == 0);
  CHECK(error == errc::truncated);
  CHECK(decodes<bytes&>);
  CHECK(decodes<const bytes&, std::error_code>);
  CHECK(decodes<std::span<const std::byte>>);
  CHECK_FALSE(decodes<bytes>);
  CHECK_FALSE(decodes<bytes, std::error_code>);
}

TEMPLATE_TEST_CASE("codec: a run id is written and read, and is no other frame's concern", "", float,
                   double) {
  const small_frame<TestType> small;
  const auto layer = [&](std::size_t l) { return std::span<const TestType>(small.values[l]); };
  for (const std::uint32_t id : {0U, 1U, 0x12345678U, 0xffffffffU}) {
    lamina::frame_encoder<TestType> encoder(small.model, id);
    const auto copy = encoder;
    for (auto each : {encoder, copy}) {
      const bytes frame = each.encode({.step = 7, .sender = 3}, small.chosen, layer).to_bytes();
      CHECK(read<std::uint32_t>(frame, run) == id);
      CHECK(lamina::decode<TestType>(frame, small.model).run() == id);
      CHECK((frame == small.frame) == (id == 0));
    }
  }
}

TEMPLATE_TEST_CASE("codec: the largest frame of a layout is a bound, and one is as large", "", float,
                   double) {
  std::mt19937 random(45);
  using enum lamina::payload_type;
  for (const auto type : {as_is, float16, bfloat16, int8, int4}) {
    for (int round = 0; round < 20; ++round) {
      const lamina::layout model = random_model(random);
      const auto values = random_tensors<TestType>(random, model);
      const auto layer = [&](std::size_t l) { return std::span<const TestType>(values[l]); };
      lamina::frame_encoder<TestType> encoder(model);
      lamina::selection chosen(model);
      const std::size_t most = lamina::largest_frame_bytes<TestType>(model, type);
      CHECK(encoder.encode({.payload = type}, chosen, layer).size_bytes() <= most);
      chosen.send_all();
      CHECK(encoder.encode({.payload = type}, chosen, layer).size_bytes() == most);
    }
  }
  // Many small layers, whose bits take more than a constant.
  const lamina::layout many = model_of(std::vector<std::size_t>(40'000, 4));
  CHECK(lamina::largest_frame_bytes<float>(many) == 64 + 5056 + 640'000);
  CHECK(lamina::largest_frame_bytes<TestType>(model_of({})) == 64);
  // Sizes that cannot be counted.
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const auto type : {as_is, float16, bfloat16, int8, int4}) {
    CHECK(lamina::largest_frame_bytes<TestType>(model_of({most}), type) == most);
  }
  CHECK(lamina::largest_frame_bytes<double>(model_of({most / 16, most / 16, most / 16})) == most);
}

TEMPLATE_TEST_CASE("codec: a true zero is not taken for a dropped layer", "", float, double) {
  const lamina::layout model = model_of({1, 1});
  lamina::selection chosen(model);
  chosen.send(0);
  const bytes frame = encode<TestType>(model, chosen, {{0}, {0}});
  const auto view = lamina::decode<TestType>(frame, model);
  CHECK_FALSE(view.is_dropped(0));
  CHECK(view.layer(0).size() == 1);
  CHECK(view.layer(0)[0] == 0);
  CHECK(view.is_dropped(1));
}

TEMPLATE_TEST_CASE("codec: payloads are opaque bits, NaN and negative zero included", "", float, double) {
  const lamina::layout model = model_of({4});
  const tensors<TestType> values = {{std::numeric_limits<TestType>::quiet_NaN(),
                                     -std::numeric_limits<TestType>::infinity(), -TestType(0),
                                     std::numeric_limits<TestType>::denorm_min()}};
  const bytes frame = encode(model, everything(model), values);
  CHECK(same_bits(lamina::decode<TestType>(frame, model).layer(0), values[0]));
}

TEST_CASE("codec: models without layers or elements have frames without payload") {
  for (const auto& sizes : {std::vector<std::size_t>{}, std::vector<std::size_t>{0, 0}}) {
    const lamina::layout model = model_of(sizes);
    const bytes frame = encode<float>(model, everything(model), tensors<float>(sizes.size()));
    CHECK(frame.size() == (sizes.empty() ? 64 : 128));
    const auto view = lamina::decode<float>(frame, model);
    CHECK(view.layers() == sizes.size());
    CHECK(view.sent_elements() == 0);
  }
}

TEST_CASE("codec: a span of another size than its layer is refused") {
  const lamina::layout model = model_of({2});
  lamina::selection chosen(model);
  chosen.send(0);
  const std::vector<float> three(3);
  lamina::frame_encoder<float> encoder(model);
  const auto layer = [&](std::size_t) -> const auto& {
    return three;
  };
  CHECK_THROWS_AS(encoder.encode({}, chosen, layer), std::invalid_argument);
}

TEST_CASE("codec: a selection of another model is refused") {
  const lamina::layout model = model_of({2});
  const std::vector<float> two(2);
  lamina::frame_encoder<float> encoder(model);
  const auto layer = [&](std::size_t) -> const auto& {
    return two;
  };
  for (const auto& other : {model_of({3}), model_of(std::vector<std::size_t>(2000, 1))}) {
    lamina::selection chosen(other);
    chosen.send(0);
    CHECK_THROWS_AS(encoder.encode({}, chosen, layer), std::invalid_argument);
  }
}

TEST_CASE("codec: a view outlives the layout it was decoded for, and has no layers once it is moved from") {
  const std::vector<float> values = {1, 2};
  bytes frame;
  lamina::frame_view<float> view;
  {
    const lamina::layout model = model_of({2});
    lamina::selection chosen(model);
    chosen.send(0);
    lamina::frame_encoder<float> encoder(model);
    frame = encoder
                .encode(
                    {}, chosen, [&](std::size_t) -> const auto& { return values; })
                .to_bytes();
    view = lamina::decode<float>(frame, model_of({2}));
  }
  std::vector<float> out(2);
  view.restore(0, out);
  CHECK(out == values);
  CHECK_THROWS_AS(view.restore(0, std::span(out).first(1)), std::invalid_argument);
  CHECK_FALSE(view.is_of(model_of({3})));
  auto taken = std::move(view);
  CHECK(taken.layers() == 1);
  CHECK(taken.is_of(model_of({2})));
  const auto is_empty = [](const lamina::frame_view<float>& left) {
    return left.layers() == 0 && !left.is_of(model_of({2}));
  };
  CHECK(is_empty(view));  // NOLINT(bugprone-use-after-move): what is left is defined
  view = std::move(taken);
  CHECK(is_empty(taken));  // NOLINT(bugprone-use-after-move)
  CHECK(view.layer(0)[1] == 2);
  lamina::frame_view<float> other;
  other = view;
  CHECK(view.is_of(model_of({2})));
  CHECK(other.is_of(model_of({2})));
}

TEST_CASE("codec: a default view has no layers") {
  const lamina::frame_view<float> view;
  CHECK(view.layers() == 0);
  CHECK(view.sent_elements() == 0);
  CHECK_THROWS_AS(view.is_dropped(0), std::out_of_range);
  CHECK_THROWS_AS(view.layer(0), std::out_of_range);
}

TEST_CASE("codec: any bytes give a frame or a named error") {
  const small_frame<float> small;
  std::mt19937 random(44);
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    bytes damaged = small.frame;
    for (std::size_t hits = 1 + below(random, 6); hits > 0; --hits) {
      damaged[below(random, damaged.size())] = static_cast<std::byte>(random());
    }
    damaged.resize(below(random, 4) == 0 ? below(random, 300) : damaged.size());
    if (damaged.size() >= 64 && random() % 2 == 0) damaged = resealed(damaged);
    std::error_code error;
    const auto view = lamina::decode<float>(damaged, small.model, error);
    refused += error ? 1 : 0;
    REQUIRE((error ? view.layers() == 0 && error.category() == lamina::category()
                   : view.layers() == 4 && view.sent_elements() * 4 + 128 == damaged.size()));
  }
  CHECK(refused > 10000);
  CHECK(refused < 20000);
}

TEST_CASE("codec: every error has a name of its own") {
  std::vector<std::string> messages;
  for (int code = 1; code <= static_cast<int>(errc::impossible_age); ++code) {
    const std::error_code error = static_cast<errc>(code);
    CHECK(error);
    CHECK(std::string(error.category().name()) == "lamina");
    CHECK(error.message() != "unknown error");
    messages.push_back(error.message());
  }
  std::ranges::sort(messages);
  CHECK(std::ranges::adjacent_find(messages) == messages.end());
  CHECK(lamina::category().message(1000) == "unknown error");
}

namespace {

// As a plugin has it that was loaded by itself, or another version of the library.
struct category_of_a_plugin : std::error_category {
  explicit category_of_a_plugin(const char* its_name) : name_(its_name) {}
  const char* name() const noexcept override { return name_; }
  std::string message(int) const override { return ""; }
  const char* name_;
};

}  // namespace

TEST_CASE("codec: an error is what its category is called, whichever object that is") {
  const category_of_a_plugin same("lamina");
  const category_of_a_plugin others("lamina.other");
  const int truncated = static_cast<int>(errc::truncated);
  CHECK(std::error_code(truncated, same) == errc::truncated);
  CHECK(errc::truncated == std::error_code(truncated, same));
  CHECK(std::error_code(truncated, same) != errc::bad_magic);
  CHECK(std::error_code(truncated, others) != errc::truncated);
  CHECK(std::error_code() != errc::truncated);
  CHECK(std::error_code(errc::truncated) == errc::truncated);
}

namespace {

struct source_is_gone : std::runtime_error {
  source_is_gone() : std::runtime_error("the source is gone") {}
};

}  // namespace

TEST_CASE("codec: an encode that throws leaves no frame, whatever was encoded before") {
  const lamina::layout model = model_of({100, 1000, 2000});
  const auto type = GENERATE(lamina::payload_type::as_is, lamina::payload_type::bfloat16);
  const std::vector<float> elements(2000, 1);
  lamina::selection some(model);
  some.send(0);
  lamina::selection all(model);
  all.send_all();
  lamina::frame_encoder<float> encoder(model);
  const auto encode = [&](const lamina::selection& chosen,
                          std::size_t fails_at) -> const lamina::encoded_frame& {
    return encoder.encode({.payload = type}, chosen, [&](std::size_t l) {
      if (l == fails_at) throw source_is_gone();
      return std::span(elements).first(model.sizes()[l]);
    });
  };
  const bytes expected = encode(all, 9).to_bytes();
  for (const std::size_t fails_at : {std::size_t{1}, std::size_t{2}}) {
    (void)encode(some, 9);
    CHECK_THROWS_AS(encode(all, fails_at), source_is_gone);
    CHECK(encoder.frame().size_bytes() == 0);
    CHECK(encoder.frame().segments().empty());
    CHECK(encoder.frame().to_bytes().empty());
    CHECK(encode(all, 9).to_bytes() == expected);
    const auto wrong_size = [&] {
      (void)encoder.encode({.payload = type}, all, [&](std::size_t) { return std::span(elements); });
    };
    CHECK_THROWS_AS(wrong_size(), std::invalid_argument);
    CHECK(encoder.frame().to_bytes().empty());
  }
}

TEST_CASE("codec: the largest frame of fragments is that of their layout") {
  const lamina::layout model = model_of({4096 * 600, 5});
  const lamina::tiling cut(model, 4096);
  for (const auto type :
       {lamina::payload_type::as_is, lamina::payload_type::int8, lamina::payload_type::int4}) {
    lamina::worker<float> worker(model, {.drop_ratio = 0, .fragment_elements = 4096, .payload = type});
    auto step = worker.begin();
    step.skip(0);
    step.skip(1);
    CHECK(step.frame().size_bytes() == lamina::largest_frame_bytes<float>(cut.fragments(), type));
    CHECK(lamina::largest_frame_bytes<float>(cut.fragments(), type) >
          lamina::largest_frame_bytes<float>(model, type));
  }
}
