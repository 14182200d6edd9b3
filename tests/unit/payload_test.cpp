// SPDX-License-Identifier: MIT
#include "lamina/payload.hpp"

#include <cmath>

#include "frames.hpp"
#include "lamina/server.hpp"

namespace lamina_test::payload_test {

using lamina::payload_bytes;
using lamina::payload_type;

namespace {

constexpr std::array block_types = {payload_type::int8, payload_type::int4};
constexpr auto rounding_types = payload_types.subspan<1>();

constexpr int largest_integer(payload_type type) {
  return type == payload_type::int4 ? 7 : 127;
}

// Of payload_bytes(), and not one more is written.
template <class T>
bytes encoded(payload_type type, const std::vector<T>& values) {
  const std::size_t size = payload_bytes<T>(type, values.size());
  bytes to(size + 8, std::byte{0xa5});
  lamina::detail::encode_payload(type, std::span<const T>(values), to.data());
  for (std::size_t i = size; i < to.size(); ++i) REQUIRE(to[i] == std::byte{0xa5});
  to.resize(size);
  return to;
}

template <class T>
std::vector<T> decoded(payload_type type, const bytes& from, std::size_t elements) {
  std::vector<T> values(elements);
  lamina::detail::decode_payload<T>(type, from.data(), elements, 0, values);
  return values;
}

template <class T>
std::vector<T> round_trip(payload_type type, const std::vector<T>& values) {
  return decoded<T>(type, encoded(type, values), values.size());
}

// Numbers of any size between 2^lowest and 2^highest, both signs, full mantissas.
template <class T>
std::vector<T> of_all_sizes(std::mt19937& random, std::size_t count, int lowest, int highest) {
  std::vector<T> values(count);
  for (T& value : values) {
    T mantissa = T(1) + static_cast<T>(random()) * T(0x1p-32) + static_cast<T>(random()) * T(0x1p-64);
    while (mantissa >= 2) mantissa /= 2;
    const int exponent = lowest + static_cast<int>(below(random, static_cast<std::size_t>(highest - lowest)));
    value = std::ldexp(random() % 2 == 0 ? mantissa : -mantissa, exponent);
  }
  return values;
}

// Whether sent and residual add up to what there was: by Knuth's two-sum, which is exact where nothing overflows.
template <class T>
bool leaves_exact_residual(payload_type type, const std::vector<T>& values) {
  const std::vector<T> sent = round_trip(type, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const volatile T left = values[i] - sent[i];
    const volatile T again = left + sent[i];
    const volatile T sent_again = again - left;
    if (!std::isfinite(sent[i]) || !std::isfinite(left) || std::abs(left) > std::abs(values[i])) return false;
    if (again != values[i] || sent[i] - sent_again != 0) return false;
  }
  return true;
}

// The range in which the type's largest number is a multiple of the last digit of what is cut there.
template <class T>
int exact_below_exponent(payload_type type) {
  if (sizeof(T) == 4) return type == payload_type::float16 ? 28 : 127;
  return type == payload_type::float16 ? 57 : 172;
}

// What a replica takes of parameters that were sent so.
template <class T>
std::vector<T> published(payload_type type, const std::vector<T>& parameters) {
  const lamina::layout model({{"weights", {parameters.size()}}});
  lamina::server<T> server(model, {.payload = type});
  const bytes frame = server.reply(0, std::array{std::span(parameters)}).to_bytes();
  std::vector<T> replica(parameters.size());
  lamina::decode<T>(frame, model).apply_to(0, replica);
  return replica;
}

}  // namespace

TEMPLATE_TEST_CASE("payload: what is beyond the range is cut, or stays in the residual", "", float, double) {
  const TestType limit = sizeof(TestType) == 4 ? TestType(0x1p29) : TestType(0x1p58);
  const TestType below = std::nextafter(limit, TestType(0));
  CHECK(round_trip<TestType>(payload_type::float16, {limit, -limit, below, -below}) ==
        std::vector<TestType>{0, 0, 65504, -65504});
  CHECK(round_trip<TestType>(payload_type::float16, {TestType(1e8F)}) == std::vector<TestType>{65504});
  const TestType most = std::numeric_limits<TestType>::max();
  for (const payload_type type : {payload_type::bfloat16, payload_type::int8}) {
    const auto sent = round_trip<TestType>(type, {most, -most});
    CHECK((sent[0] > 0) == (sizeof(TestType) == 4));  // a float's are in reach of both, a double's of neither
    CHECK(std::isfinite(sent[0]));
    CHECK(sent[1] == -sent[0]);
  }
}

TEMPLATE_TEST_CASE("payload: what is left over is exact", "", float, double) {
  using limits = std::numeric_limits<TestType>;
  std::mt19937 random(313);
  // Half-way between two numbers that can be written, and what is next to nothing.
  std::vector<TestType> hard = {
      limits::denorm_min(), -limits::denorm_min(), limits::min(), 127, -TestType(0), 0};
  for (int i = 0; i < 127; ++i) hard.push_back(TestType(i) + TestType(0.5));
  for (int i = 2048; i < 2100; ++i) hard.push_back(static_cast<TestType>(2 * i + 1));
  for (int i = 256; i < 300; ++i) hard.push_back(static_cast<TestType>(2 * i + 1));
  for (const payload_type type : rounding_types) {
    CAPTURE(static_cast<int>(type));
    const int beyond = exact_below_exponent<TestType>(type);
    for (int round = 0; round < 10; ++round) {
      // Tiny numbers, then large ones next to tiny ones in the same block.
      for (const auto& [lowest, highest] : {std::pair{-20, 18},
                                            {limits::min_exponent - 20, -100},
                                            {beyond - 30, beyond},
                                            {-149, std::min(beyond, 127)}})
        CHECK(leaves_exact_residual(type, of_all_sizes<TestType>(random, 640, lowest, highest)));
      // Every element in a block of its own, too.
      for (const TestType x : of_all_sizes<TestType>(random, 300, -140, beyond))
        REQUIRE(leaves_exact_residual<TestType>(type, {x}));
    }
    CHECK(leaves_exact_residual(type, hard));
    CHECK(leaves_exact_residual<TestType>(type, std::vector<TestType>(130, -TestType(0))));
    // Far beyond the type's range.
    const int more = std::min(beyond + 1, limits::max_exponent - 1);
    CHECK(leaves_exact_residual<TestType>(
        type, {std::ldexp(TestType(1), more), limits::max() / 2, -limits::max() / 2}));
  }
  CHECK(leaves_exact_residual<double>(payload_type::int4, {0x1p172, -0x1.fffffffffffffp172}));
}

TEST_CASE("payload: integers in the middle of a block round to nearest, ties to even") {
  for (const payload_type type : block_types) {
    const auto most = static_cast<float>(largest_integer(type));
    const std::vector<float> values = {
        most, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, 2.75F, -3.25F, std::nextafter(0.5F, 1.0F)};
    CHECK(round_trip(type, values) == std::vector<float>{most, 0, 2, 2, 0, -2, 3, -3, 1});
  }
}

// By docs/wire-format.md: the scale of block `b`, and the trits of its elements.
struct ternary_block {
  double scale;
  std::vector<int> trits;
};
ternary_block ternary_block_of(const bytes& wire, std::size_t elements, std::size_t b) {
  const std::size_t blocks = (elements + 63) / 64;
  const std::size_t count = std::min<std::size_t>(64, elements - 64 * b);
  const std::size_t stride = (count + 4) / 5;
  ternary_block read{std::ldexp(1.0, std::to_integer<int>(wire[b]) - 127), {}};
  for (std::size_t i = 0; i < count; ++i) {
    int packed = std::bit_cast<std::int8_t>(wire[blocks + 13 * b + i % stride]) + 121;
    for (std::size_t k = 0; k < i / stride; ++k) packed /= 3;
    read.trits.push_back(packed % 3 - 1);
  }
  return read;
}

TEMPLATE_TEST_CASE("payload: ternary sends what is at least half of its block's scale", "", float, double) {
  std::mt19937 random(341);
  for (const std::size_t elements : {1, 4, 5, 6, 63, 64, 65, 69, 128, 4097}) {
    for (const int size : {-90, -20, 0, 30, 100}) {
      const auto values = of_all_sizes<TestType>(random, elements, size - 4, size);
      const bytes wire = encoded(payload_type::ternary, values);
      CHECK(wire.size() == (elements + 63) / 64 + elements / 64 * 13 + (elements % 64 + 4) / 5);
      const auto back = decoded<TestType>(payload_type::ternary, wire, elements);
      for (std::size_t b = 0; 64 * b < elements; ++b) {
        const ternary_block block = ternary_block_of(wire, elements, b);
        double magnitudes = 0;
        double squares = 0;
        for (std::size_t i = 0; i < block.trits.size(); ++i) {
          const double value = values[64 * b + i];
          magnitudes += std::abs(value);
          squares += value * value;
          const int trit = std::abs(value) < block.scale / 2 ? 0 : value < 0 ? -1 : 1;
          REQUIRE(block.trits[i] == trit);
          REQUIRE(double{back[64 * b + i]} == trit * block.scale);
        }
        REQUIRE(std::abs(std::log2(block.scale * magnitudes / squares)) <= 0.5000001);
      }
      // Any range that begins with a block.
      for (std::size_t begin = 0; begin < elements; begin += 64) {
        std::vector<TestType> some(std::min<std::size_t>(elements - begin, 100));
        lamina::detail::decode_payload<TestType>(payload_type::ternary, wire.data(), elements, begin, some);
        REQUIRE(std::equal(some.begin(), some.end(), back.begin() + static_cast<std::ptrdiff_t>(begin)));
      }
      REQUIRE(leaves_exact_residual(payload_type::ternary, values));
      REQUIRE(encoded(payload_type::ternary, back) == wire);  // what was read is written as it was
    }
  }
  CHECK(encoded<TestType>(payload_type::ternary, {0, 0, 0}) == bytes{std::byte{7}, std::byte{0}});
}

TEMPLATE_TEST_CASE("payload: ternary of what is not finite, the smallest and the largest", "", float,
                   double) {
  using limits = std::numeric_limits<TestType>;
  for (const TestType bad : {limits::quiet_NaN(), limits::infinity(), -limits::infinity()}) {
    const auto sent = round_trip<TestType>(payload_type::ternary, {1, bad, -1, 0});
    CHECK(sent == round_trip<TestType>(payload_type::ternary, {1, 0, -1, 0}));
    CHECK(sent == std::vector<TestType>{1, 0, -1, 0});
  }
  CHECK(leaves_exact_residual<TestType>(payload_type::ternary, {limits::denorm_min(), -limits::min(),
                                                                TestType(0x1p-119), TestType(-0x1p-121)}));
  CHECK(leaves_exact_residual<TestType>(payload_type::ternary, {limits::max(), -limits::max() / 4, 1}));
  const auto most = static_cast<TestType>(std::numeric_limits<float>::max());
  CHECK(round_trip<TestType>(payload_type::ternary, {most, -most}) ==
        std::vector<TestType>{TestType(0x1p120), TestType(-0x1p120)});
}

TEST_CASE("payload: ternary is of gradients and updates, and a byte that is no five trits is refused") {
  const lamina::layout model = model_of({64, 3});
  const tensors<float> layers = {std::vector<float>(64, 1.0F), {1, -1, 0}};
  const auto sent = everything(model);
  CHECK(throws<std::invalid_argument>([&] {
    frame_of(sent, layers, {.kind = lamina::frame_kind::parameters, .payload = payload_type::ternary});
  }));
  CHECK(throws<std::invalid_argument>(
      [&] { lamina::server<float>(model, {.payload = payload_type::ternary}); }));
  const bytes frame = without_checksum(
      frame_of(sent, layers, {.kind = lamina::frame_kind::updates, .payload = payload_type::ternary}));
  for (std::size_t at = payload_at; at < frame.size(); ++at) {
    bytes changed = frame;
    changed[at] = std::byte{122};
    // A scale of 2^-5 is one; five trits are of -121 to 121.
    const bool is_scale = at == payload_at || at == payload_at + 14;
    CHECK(refusal<float>(changed, model) == (is_scale ? lamina::errc{} : lamina::errc::bad_trits));
  }
}

// Rows whose numbers are all within the range have a way of their own, which a NaN among them closes.
TEMPLATE_TEST_CASE("payload: a NaN in a row changes nothing of the others", "", float, double) {
  std::mt19937 random(331);
  const auto check = [&](payload_type type, std::vector<TestType> row) {
    row.resize(64);
    row[0] = 0;
    const auto expected = round_trip(type, row);
    row[0] = std::numeric_limits<TestType>::quiet_NaN();
    const auto with_nan = round_trip(type, row);
    REQUIRE(same_bits(std::span(with_nan).subspan(1), std::span(expected).subspan(1)));
  };
  for (const payload_type type : rounding_types) {
    for (int round = 0; round < 300; ++round) {
      const int lowest = static_cast<int>(below(random, 240)) - 140;
      check(type,
            of_all_sizes<TestType>(random, 64, lowest, lowest + 1 + static_cast<int>(below(random, 30))));
    }
  }
  check(payload_type::float16, {0, TestType(65519), TestType(65520), -TestType(65535), TestType(65536)});
  for (const TestType most :
       {TestType(65504), TestType(0x1.fep127), TestType(7 * 0x1p120), TestType(127 * 0x1p120)}) {
    const auto more = std::nextafter(most, std::numeric_limits<TestType>::max());
    for (const payload_type type : rounding_types)
      check(type, {0, most, -most, more, -more, most / 3, TestType(1)});
  }
}

TEMPLATE_TEST_CASE("payload: parameters beyond a type's range become its largest", "", float, double) {
  using limits = std::numeric_limits<TestType>;
  const TestType most = limits::max();
  for (const payload_type type : {payload_type::float16, payload_type::bfloat16}) {
    const TestType largest = type == payload_type::float16 ? TestType(65504) : TestType(0x1.fep127);
    const auto given = published<TestType>(
        type, {most, -most, 1.5, limits::infinity(), -limits::infinity(), limits::quiet_NaN()});
    CHECK(std::vector<TestType>(given.begin(), given.begin() + 5) ==
          std::vector<TestType>{largest, -largest, 1.5, limits::infinity(), -limits::infinity()});
    CHECK(std::isnan(given[5]));
  }
  for (const payload_type type : block_types) {
    const auto whole = published(type, std::vector<TestType>{most, -most, 0});
    CHECK(whole[0] == static_cast<TestType>(largest_integer(type)) * TestType(0x1p120));
    CHECK(whole[1] == -whole[0]);
    for (const TestType bad : {limits::infinity(), limits::quiet_NaN()}) {
      std::vector<TestType> parameters(100, 1);
      parameters[99] = bad;
      const auto message = message_of<std::invalid_argument>([&] { published(type, parameters); });
      CHECK(contains(message, "'weights'"));
      CHECK(contains(message, type == payload_type::int4 ? "int4" : "int8"));
    }
  }
}

}  // namespace lamina_test::payload_test
