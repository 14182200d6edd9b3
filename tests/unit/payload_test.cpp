// SPDX-License-Identifier: MIT
#include "lamina/payload.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>

#include "catch.hpp"
#include "lamina/codec.hpp"
#include "lamina/server.hpp"
#include "lamina/worker.hpp"
#include "steps.hpp"

using lamina::errc;
using lamina::payload_bytes;
using lamina::payload_type;
using namespace lamina_test;

namespace {

constexpr std::array every_type = {payload_type::as_is, payload_type::float16, payload_type::bfloat16,
                                   payload_type::int8, payload_type::int4};
constexpr std::array block_types = {payload_type::int8, payload_type::int4};
constexpr std::array rounding_types = {payload_type::float16, payload_type::bfloat16, payload_type::int8,
                                       payload_type::int4};

constexpr int largest_integer(payload_type type) {
  return type == payload_type::int4 ? 7 : 127;
}

template <class T>
bytes encoded(payload_type type, const std::vector<T>& values) {
  bytes to(payload_bytes<T>(type, values.size()));
  lamina::detail::encode_payload(type, std::span<const T>(values), to.data());
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

// Integer `i` of a layer of one block, by docs/wire-format.md.
int integer_of(payload_type type, const bytes& wire, std::size_t i) {
  if (type == payload_type::int8) return std::bit_cast<std::int8_t>(wire[1 + i]);
  const int nibble = (std::to_integer<int>(wire[1 + i / 2]) >> (i % 2 * 4)) & 0x0f;
  return nibble < 8 ? nibble : nibble - 16;
}

template <class T>
auto bits_of_one(T number) {
  return std::bit_cast<std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>(number);
}

int scale_exponent(std::byte scale) {
  return std::to_integer<int>(scale) - 127;
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

// Fractions whose size differs from one int8 block to the next, so that every block has its own scale.
template <class T>
std::vector<T> uneven_fractions(std::mt19937& random, std::size_t count) {
  auto values = random_fractions<T>(random, count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = std::ldexp(values[i], static_cast<int>(i / 64 * 7 % 23) - 11);
  }
  return values;
}

// What x - sent lost by rounding (Knuth's two-sum, exact wherever nothing overflows).
template <class T>
T lost(T x, T sent) {
  const volatile T left = x - sent;
  const volatile T x_again = left + sent;
  const volatile T sent_again = x_again - left;
  const volatile T error_of_sent = sent - sent_again;
  const volatile T error_of_left = x - x_again;
  return static_cast<T>(left + sent) == x && error_of_sent == 0 && error_of_left == 0 ? T(0) : T(1);
}

template <class T>
bool leaves_exact_rest(payload_type type, const std::vector<T>& values) {
  const std::vector<T> sent = round_trip(type, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const T left = values[i] - sent[i];
    if (!std::isfinite(sent[i]) || !std::isfinite(left)) return false;
    if (static_cast<long double>(values[i]) - static_cast<long double>(sent[i]) !=
            static_cast<long double>(left) ||
        lost(values[i], sent[i]) != 0) {
      return false;
    }
  }
  return true;
}

// The range in which the type's largest number is a multiple of the last digit of what is cut there.
template <class T>
int exact_below_exponent(payload_type type) {
  if (sizeof(T) == 4) return type == payload_type::float16 ? 28 : 127;
  return type == payload_type::float16 ? 57 : 172;
}

template <class T>
bytes frame_of(const lamina::layout& model, const lamina::selection& chosen, const tensors<T>& layers,
               payload_type type, std::uint64_t step = 1, std::uint32_t sender = 0) {
  lamina::frame_encoder<T> encoder(model);
  return encoder
      .encode({.step = step, .sender = sender, .payload = type}, chosen,
              [&](std::size_t l) { return std::span<const T>(layers[l]); })
      .to_bytes();
}

template <class T>
errc refusal(std::span<const std::byte> frame, const lamina::layout& model) {
  std::error_code error;
  const auto view = lamina::decode<T>(frame, model, error);
  CHECK((error ? view.layers() == 0 : view.layers() == model.layers()));
  return static_cast<errc>(error.value());
}

}  // namespace

TEST_CASE("payload: bytes of a layer for every type") {
  struct row {
    std::size_t elements, halves, int8, int4;
  };
  for (const row each :
       {row{0, 0, 0, 0}, row{1, 2, 2, 2}, row{2, 4, 3, 2}, row{63, 126, 64, 33}, row{64, 128, 65, 33},
        row{65, 130, 67, 35}, row{4096, 8192, 4160, 2112}, row{4097, 8194, 4162, 2114}}) {
    CAPTURE(each.elements);
    CHECK(payload_bytes<float>(payload_type::as_is, each.elements) == 4 * each.elements);
    CHECK(payload_bytes<double>(payload_type::as_is, each.elements) == 8 * each.elements);
    for (const payload_type type : {payload_type::float16, payload_type::bfloat16}) {
      CHECK(payload_bytes<float>(type, each.elements) == each.halves);
      CHECK(payload_bytes<double>(type, each.elements) == each.halves);
    }
    CHECK(payload_bytes<float>(payload_type::int8, each.elements) == each.int8);
    CHECK(payload_bytes<double>(payload_type::int8, each.elements) == each.int8);
    CHECK(payload_bytes<float>(payload_type::int4, each.elements) == each.int4);
    CHECK(payload_bytes<double>(payload_type::int4, each.elements) == each.int4);
  }
}

TEMPLATE_TEST_CASE("payload: encoding writes payload_bytes and not one more", "", float, double) {
  std::mt19937 random(311);
  for (const payload_type type : rounding_types) {
    for (const std::size_t elements : {0, 1, 63, 64, 65, 127, 128, 129, 4096, 4097}) {
      const auto values = random_fractions<TestType>(random, elements);
      const std::size_t size = payload_bytes<TestType>(type, elements);
      bytes guarded(size + 8, std::byte{0xa5});
      lamina::detail::encode_payload(type, std::span<const TestType>(values), guarded.data());
      for (std::size_t i = size; i < guarded.size(); ++i) REQUIRE(guarded[i] == std::byte{0xa5});
    }
  }
}

TEMPLATE_TEST_CASE("payload: the error of a round trip is bounded by the type's precision", "", float,
                   double) {
  std::mt19937 random(312);
  for (int round = 0; round < 20; ++round) {
    // A double takes the way over float, which costs 2^-24 once more.
    const double over_float = sizeof(TestType) == 4 ? 0 : 0x1p-24;
    const auto in_range = of_all_sizes<TestType>(random, 4097, -14, 15);
    const auto halves = round_trip(payload_type::float16, in_range);
    for (std::size_t i = 0; i < in_range.size(); ++i) {
      REQUIRE(std::abs(halves[i] - in_range[i]) <= (0x1p-11 + over_float) * std::abs(in_range[i]));
    }
    const auto tiny = of_all_sizes<TestType>(random, 4097, -60, -14);
    const auto tiny_halves = round_trip(payload_type::float16, tiny);
    for (std::size_t i = 0; i < tiny.size(); ++i) {
      REQUIRE(std::abs(tiny_halves[i] - tiny[i]) <= 0x1p-25);
    }
    const auto any = of_all_sizes<TestType>(random, 4097, -126, 127);
    const auto brain = round_trip(payload_type::bfloat16, any);
    for (std::size_t i = 0; i < any.size(); ++i) {
      REQUIRE(std::abs(brain[i] - any[i]) <= (0x1p-8 + over_float) * std::abs(any[i]));
    }
    const auto values = of_all_sizes<TestType>(random, 4097, -10, 10);
    for (const payload_type type : block_types) {
      const auto integers = round_trip(type, values);
      for (std::size_t begin = 0; begin < values.size(); begin += 64) {
        const std::size_t end = std::min<std::size_t>(values.size(), begin + 64);
        TestType largest = 0;
        for (std::size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
        for (std::size_t i = begin; i < end; ++i) {
          REQUIRE(std::abs(integers[i] - values[i]) <=
                  largest / static_cast<TestType>(largest_integer(type)));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("payload: what the type can write comes back as it was", "", float, double) {
  const std::vector<TestType> numbers = {0, 1, -1, TestType(0.5), -96, 127, TestType(1.984375)};
  for (const payload_type type : {payload_type::float16, payload_type::bfloat16}) {
    CHECK(same_bits(round_trip(type, numbers), numbers));
  }
  for (const int exponent : {-120, -40, 0, 40, 110}) {
    std::vector<TestType> values;
    for (int i = -127; i <= 127; ++i) values.push_back(std::ldexp(TestType(i), exponent));
    for (std::size_t begin = 0; begin + 64 <= values.size(); ++begin) {
      std::vector<TestType> block(values.begin() + std::ptrdiff_t(begin),
                                  values.begin() + std::ptrdiff_t(begin) + 64);
      block[17] = values.back();
      REQUIRE(round_trip(payload_type::int8, block) == block);
    }
    for (std::size_t size = 1; size <= 64; ++size) {
      std::vector<TestType> block(size);
      for (std::size_t i = 0; i < size; ++i)
        block[i] = std::ldexp(static_cast<TestType>(static_cast<int>(i * 4 % 15) - 7), exponent);
      REQUIRE(round_trip(payload_type::int4, block) == block);
    }
  }
}

TEMPLATE_TEST_CASE("payload: numbers beyond the type's range are cut to its largest of the same sign", "",
                   float, double) {
  const TestType big = TestType(1e8F);
  CHECK(round_trip<TestType>(payload_type::float16, {big, -big}) == std::vector<TestType>{65504, -65504});
}

TEMPLATE_TEST_CASE("payload: numbers so large that no rest could be written down are not sent", "", float,
                   double) {
  const TestType limit = sizeof(TestType) == 4 ? TestType(0x1p29) : TestType(0x1p58);
  const TestType below = std::nextafter(limit, TestType(0));
  CHECK(round_trip<TestType>(payload_type::float16, {limit, -limit, below, -below}) ==
        std::vector<TestType>{0, 0, 65504, -65504});
  const TestType most = std::numeric_limits<TestType>::max();
  for (const payload_type type : {payload_type::bfloat16, payload_type::int8}) {
    const auto sent = round_trip<TestType>(type, {most, -most});
    CHECK((sent[0] > 0) == (sizeof(TestType) == 4));  // a float's are in reach of both, a double's of neither
    CHECK(std::isfinite(sent[0]));
    CHECK(sent[1] == -sent[0]);
  }
}

TEMPLATE_TEST_CASE("payload: what is left over is exact", "", float, double) {
  std::mt19937 random(313);
  const TestType least = std::numeric_limits<TestType>::denorm_min();
  const TestType smallest = std::numeric_limits<TestType>::min();
  for (const payload_type type : rounding_types) {
    CAPTURE(static_cast<int>(type));
    for (int round = 0; round < 10; ++round) {
      CHECK(leaves_exact_rest(type, random_fractions<TestType>(random, 1000)));
      CHECK(leaves_exact_rest(type, of_all_sizes<TestType>(random, 1000, -20, 18)));
      // Tiny numbers, then large ones next to tiny ones in the same block.
      const int lowest = std::numeric_limits<TestType>::min_exponent - 20;
      CHECK(leaves_exact_rest(type, of_all_sizes<TestType>(random, 1000, lowest, -100)));
      const int beyond = exact_below_exponent<TestType>(type);
      CHECK(leaves_exact_rest(type, of_all_sizes<TestType>(random, 1000, beyond - 30, beyond)));
      // Every element alone in its block too.
      for (const TestType x : of_all_sizes<TestType>(random, 1000, -140, beyond)) {
        REQUIRE(leaves_exact_rest<TestType>(type, {x}));
      }
    }
    CHECK(leaves_exact_rest<TestType>(type, std::vector<TestType>(130, TestType(0))));
    CHECK(leaves_exact_rest<TestType>(type, std::vector<TestType>(130, -TestType(0))));
    CHECK(
        leaves_exact_rest<TestType>(type, {least, -least, 3 * least, smallest, -smallest, 0, -TestType(0)}));
    // Ties: half-way between two numbers that can be written.
    std::vector<TestType> ties;
    for (int i = 0; i < 127; ++i) ties.push_back(TestType(i) + TestType(0.5));
    for (int i = 2048; i < 2100; ++i) ties.push_back(static_cast<TestType>(2 * i + 1));
    for (int i = 256; i < 300; ++i) ties.push_back(static_cast<TestType>(2 * i + 1));
    ties.push_back(127);
    CHECK(leaves_exact_rest(type, ties));
  }
}

TEST_CASE("payload: what is left over is exact for every float of a block with large and tiny neighbours") {
  std::mt19937 random(314);
  for (const payload_type type : {payload_type::bfloat16, payload_type::int8, payload_type::int4}) {
    for (int round = 0; round < 50; ++round) {
      const auto values = of_all_sizes<float>(random, 640, -149, 127);
      const auto sent = round_trip(type, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float left = values[i] - sent[i];
        REQUIRE(lost(values[i], sent[i]) == 0);
        REQUIRE(std::abs(left) <= std::abs(values[i]));
      }
    }
  }
}

// Cut at the largest number of the type, whose last digit is below that of the number cut.
TEST_CASE("payload: what is left over is exact far beyond the type's range too") {
  CHECK(leaves_exact_rest<float>(payload_type::float16, {0x1p30F}));
  CHECK(leaves_exact_rest<float>(payload_type::float16, {1e30F, -1e30F}));
  CHECK(leaves_exact_rest<double>(payload_type::float16, {0x1p60}));
  CHECK(leaves_exact_rest<double>(payload_type::bfloat16, {1e300, -1e300}));
  CHECK(leaves_exact_rest<double>(payload_type::int8, {1e300, -1e300}));
  CHECK(leaves_exact_rest<double>(payload_type::int4, {1e300, -1e300, 0x1p172, -0x1.fffffffffffffp172}));
}

TEMPLATE_TEST_CASE("payload: scales are powers of two, as small as the block allows", "", float, double) {
  std::mt19937 random(315);
  for (const payload_type type : block_types) {
    const auto most = static_cast<TestType>(largest_integer(type));
    for (int round = 0; round < 200; ++round) {
      const int size = static_cast<int>(below(random, 200)) - 100;
      const auto values = of_all_sizes<TestType>(random, 64 * 5 + 9, size - 6, size);
      const bytes wire = encoded(type, values);
      for (std::size_t block = 0; block < 6; ++block) {
        TestType largest = 0;
        for (std::size_t i = 64 * block; i < std::min(values.size(), 64 * block + 64); ++i) {
          largest = std::max(largest, std::abs(values[i]));
        }
        const int exponent = scale_exponent(wire[block]);
        REQUIRE(largest <= std::ldexp(most, exponent));
        REQUIRE(largest > std::ldexp(most, exponent - 1));
        REQUIRE(same_bits(static_cast<double>(lamina::detail::scale_value<TestType>(
                              std::to_integer<std::uint8_t>(wire[block]))),
                          std::ldexp(1.0, exponent)));
      }
    }
  }
}

TEMPLATE_TEST_CASE("payload: the largest element of a block of integers never wraps", "", float, double) {
  const TestType infinity = std::numeric_limits<TestType>::infinity();
  for (const payload_type type : block_types) {
    const int most_integer = largest_integer(type);
    for (int exponent = -113; exponent <= 119; ++exponent) {
      for (const double base :
           {64.0, 63.5, 127.0, 127.25, 127.5, 127.75, 128.0, 126.5, 100.0, 112.0, 120.0}) {
        const TestType exact = std::ldexp(static_cast<TestType>(base), exponent);
        for (const TestType largest :
             {exact, std::nextafter(exact, infinity), std::nextafter(exact, TestType(0))}) {
          for (const TestType signed_largest : {largest, -largest}) {
            const bytes wire =
                encoded<TestType>(type, {signed_largest / 3, signed_largest, signed_largest / 7});
            const int integer = integer_of(type, wire, 1);
            CAPTURE(base, exponent);
            REQUIRE((integer < 0) == (signed_largest < 0));
            REQUIRE(std::abs(integer) >= most_integer / 2 + 1);
            REQUIRE(std::abs(integer) <= most_integer);
          }
        }
      }
    }
    // Beyond the scales there are: cut or zero, of the same sign.
    const TestType most = std::numeric_limits<float>::max();
    const bytes wire = encoded<TestType>(type, {most, -most});
    CHECK(integer_of(type, wire, 0) == most_integer);
    CHECK(integer_of(type, wire, 1) == -most_integer);
    const TestType least = std::numeric_limits<TestType>::denorm_min();
    CHECK(round_trip<TestType>(type, {least, -least}) == std::vector<TestType>{0, 0});
    CHECK(round_trip<TestType>(type, {0, 0}) == std::vector<TestType>{0, 0});
  }
}

TEMPLATE_TEST_CASE("payload: integers in the middle of a block round to nearest, ties to even", "", float,
                   double) {
  for (const payload_type type : block_types) {
    const auto most = static_cast<TestType>(largest_integer(type));
    const std::vector<TestType> values = {most,
                                          TestType(0.5),
                                          TestType(1.5),
                                          TestType(2.5),
                                          TestType(-0.5),
                                          -TestType(1.5),
                                          TestType(2.75),
                                          -TestType(3.25),
                                          std::nextafter(TestType(0.5), TestType(1)),
                                          std::nextafter(TestType(0.5), TestType(0))};
    CHECK(round_trip(type, values) == std::vector<TestType>{most, 0, 2, 2, 0, -2, 3, -3, 1, 0});
  }
}

TEST_CASE("payload: int4 is two integers a byte, the first in the lower half") {
  const bytes wire = encoded<float>(payload_type::int4, {1, -2, 7, 0, -7});
  CHECK(wire == bytes{std::byte{127}, std::byte{0xe1}, std::byte{0x07}, std::byte{0x09}});
  // -8, which is not written, is read as what it says.
  CHECK(decoded<float>(payload_type::int4, {std::byte{128}, std::byte{0x78}}, 2) ==
        std::vector<float>{-16, 14});
}

// A row of 64 has its loops, and so has what is left of one; every element is treated as it would be alone with the block's largest.
TEMPLATE_TEST_CASE("payload: no element's place changes what is written of it", "", float, double) {
  std::mt19937 random(320);
  for (const payload_type type : rounding_types) {
    for (const std::size_t size : {2, 7, 63, 64, 65, 128, 191}) {
      auto values = of_all_sizes<TestType>(random, size, -20, 10);
      for (std::size_t begin = 0; begin < size; begin += 64) values[begin] = TestType(1000);
      const auto sent = round_trip(type, values);
      for (std::size_t i = 0; i < size; ++i)
        REQUIRE(round_trip<TestType>(type, {TestType(1000), values[i]})[1] == sent[i]);
    }
  }
}

// Rows whose numbers are all within the range have a way of their own, which a NaN among them closes.
TEMPLATE_TEST_CASE("payload: a NaN beside them changes nothing that is written of the others", "", float,
                   double) {
  std::mt19937 random(331);
  const auto nan = std::numeric_limits<TestType>::quiet_NaN();
  const auto check = [&](payload_type type, std::vector<TestType> row) {
    row.resize(64);
    row[0] = 0;
    const auto alone = round_trip(type, row);
    row[0] = nan;
    const auto beside = round_trip(type, row);
    for (std::size_t i = 1; i < 64; ++i) REQUIRE(bits_of_one(alone[i]) == bits_of_one(beside[i]));
  };
  for (const payload_type type : rounding_types) {
    for (int round = 0; round < 300; ++round) {
      const int lowest = static_cast<int>(below(random, 240)) - 140;
      check(type,
            of_all_sizes<TestType>(random, 64, lowest, lowest + 1 + static_cast<int>(below(random, 30))));
    }
  }
  // Each number of the halves, and what is next to it and halfway to the next.
  const auto check_numbers = [&]<class Half>(payload_type type, Half infinity) {
    const auto number_of = [](int bits) {
      return static_cast<TestType>(lamina::to_float(Half{static_cast<std::uint16_t>(bits)}));
    };
    for (int bits = 0; bits < infinity.bits; bits += 16) {
      std::vector<TestType> row(1);
      for (int k = 0; k < 16; ++k) {
        const TestType number = number_of(bits + k);
        const TestType next = number_of(bits + k + 1);
        const TestType tie = std::isfinite(next) ? number + (next - number) / 2 : number;
        row.insert(row.end(),
                   {-number, tie, std::nextafter(tie, TestType(0)), -std::nextafter(tie, TestType(1e38F))});
      }
      row.pop_back();
      check(type, row);
    }
  };
  check_numbers(payload_type::float16, lamina::float16{0x7c00});
  check_numbers(payload_type::bfloat16, lamina::bfloat16{0x7f80});
  check(payload_type::float16, {0, TestType(65519), TestType(65520), -TestType(65535), TestType(65536)});
  for (const TestType most :
       {TestType(65504), TestType(0x1.fep127), TestType(7 * 0x1p120), TestType(127 * 0x1p120)}) {
    const auto more = std::nextafter(most, std::numeric_limits<TestType>::max());
    for (const payload_type type : rounding_types)
      check(type, {0, most, -most, more, -more, most / 3, TestType(1)});
  }
}

TEMPLATE_TEST_CASE("payload: frames of every type hold what encode_payload wrote, size and all", "", float,
                   double) {
  std::mt19937 random(316);
  const lamina::layout model = model_of({3, 0, 64, 65, 4096 + 70, 1, 7});
  lamina::selection chosen(model);
  for (const std::size_t l : {0, 2, 3, 4, 6}) chosen.send(l);
  tensors<TestType> layers;
  for (const std::size_t size : model.sizes()) layers.push_back(uneven_fractions<TestType>(random, size));
  for (const payload_type type : every_type) {
    CAPTURE(static_cast<int>(type));
    const bytes frame = frame_of(model, chosen, layers, type, 9, 4);
    std::size_t size = 64 + 64;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (chosen.is_sent(l)) size += payload_bytes<TestType>(type, model.sizes()[l]);
    }
    REQUIRE(frame.size() == size);
    const auto view = lamina::decode<TestType>(frame, model);
    CHECK(view.payload() == type);
    CHECK(view.step() == 9);
    CHECK(view.sender() == 4);
    CHECK(view.sent_elements() == chosen.sent_elements());
    for (std::size_t l = 0; l < model.layers(); ++l) {
      std::vector<TestType> out(model.sizes()[l], TestType(-1));
      view.restore(l, out);
      CHECK(view.is_dropped(l) == chosen.is_dropped(l));
      if (chosen.is_dropped(l)) {
        CHECK(same_bits(out, std::vector<TestType>(out.size())));
        CHECK(view.bytes_of(l).empty());
      } else if (type == payload_type::as_is) {
        CHECK(same_bits(out, layers[l]));
        CHECK(same_bits(view.layer(l), layers[l]));
      } else {
        CHECK(same_bits(out, round_trip(type, layers[l])));
        CHECK(same_bits(view.bytes_of(l), encoded(type, layers[l])));
        CHECK_THROWS_AS(view.layer(l), std::logic_error);
      }
      CHECK_THROWS_AS(view.restore(l, std::vector<TestType>(out.size() + 1)), std::invalid_argument);
    }
    CHECK_THROWS_AS(view.layer(7), std::out_of_range);
    CHECK_THROWS_AS(view.bytes_of(7), std::out_of_range);
  }
}

TEMPLATE_TEST_CASE("payload: one encoder writes frames of different types one after the other", "", float,
                   double) {
  std::mt19937 random(317);
  const lamina::layout model = model_of({100, 200});
  lamina::frame_encoder<TestType> encoder(model);
  tensors<TestType> layers;
  for (const std::size_t size : model.sizes()) layers.push_back(uneven_fractions<TestType>(random, size));
  for (int round = 0; round < 20; ++round) {
    const payload_type type = every_type[random() % every_type.size()];
    lamina::selection chosen(model);
    if (random() % 2 == 0) chosen.send(0);
    if (random() % 2 == 0) chosen.send(1);
    const bytes frame = encoder
                            .encode({.payload = type}, chosen,
                                    [&](std::size_t l) { return std::span<const TestType>(layers[l]); })
                            .to_bytes();
    REQUIRE(frame == frame_of(model, chosen, layers, type));
  }
}

TEMPLATE_TEST_CASE(
    "payload: copy gives any stretch, of integers from the beginning of a block on, and refuses others", "",
    float, double) {
  std::mt19937 random(318);
  const std::size_t elements = 4096 + 200;
  const lamina::layout model = model_of({5, elements, 10});
  lamina::selection chosen(model);
  chosen.send(0);
  chosen.send(1);
  tensors<TestType> layers;
  for (const std::size_t size : model.sizes()) layers.push_back(uneven_fractions<TestType>(random, size));
  for (const payload_type type : every_type) {
    CAPTURE(static_cast<int>(type));
    const bytes frame = frame_of(model, chosen, layers, type);
    const auto view = lamina::decode<TestType>(frame, model);
    std::vector<TestType> whole(elements);
    view.restore(1, whole);
    for (const std::size_t begin : {0, 1, 63, 64, 4096, 4096 + 192, 4096 + 199}) {
      const bool splits_a_block = lamina::has_blocks(type) && begin % 64 != 0;
      for (const std::size_t count : {0, 1, 63, 64, 65, 104, 200}) {
        std::vector<TestType> some(count, TestType(-1));
        if (begin + count > elements || splits_a_block) {
          CHECK_THROWS_AS(view.copy(1, begin, some), std::out_of_range);
          CHECK_THROWS_AS(view.read(1, begin, some), std::out_of_range);
          CHECK(same_bits(some, std::vector<TestType>(count, TestType(-1))));
        } else {
          std::vector<TestType> buffer(count);
          const std::span<const TestType> read = view.read(1, begin, buffer);
          CHECK(same_bits(read, std::span(whole).subspan(begin, count)));
          // As is they are read where they lie.
          CHECK(read.data() == (type == payload_type::as_is ? view.layer(1).data() + begin : buffer.data()));
          view.copy(1, begin, some);
          CHECK(same_bits(some, read));
        }
      }
    }
    std::vector<TestType> one(1);
    CHECK_THROWS_AS(view.copy(1, 4352, one), std::out_of_range);  // beyond the end
    CHECK_THROWS_AS(view.copy(1, std::size_t{0} - 64, one), std::out_of_range);
    CHECK_THROWS_AS(view.copy(0, 0, std::span(whole).first(6)), std::out_of_range);
    CHECK_THROWS_AS(view.copy(2, 0, one), std::out_of_range);  // held back
    CHECK_THROWS_AS(view.copy(3, 0, one), std::out_of_range);  // no such layer
    CHECK_THROWS_AS(view.read(1, 4352, one), std::out_of_range);
    CHECK_THROWS_AS(view.read(2, 0, one), std::out_of_range);
    CHECK_THROWS_AS(view.read(3, 0, one), std::out_of_range);
  }
}

TEMPLATE_TEST_CASE("payload: a layer is walked in consecutive blocks, in place where it is as is", "", float,
                   double) {
  std::mt19937 random(312);
  const lamina::layout model = model_of({1, 4096, 0, 3 * 4096 + 200, 5});
  lamina::selection chosen(model);
  chosen.send_all();
  tensors<TestType> layers;
  for (const std::size_t size : model.sizes()) layers.push_back(uneven_fractions<TestType>(random, size));
  for (const payload_type type : every_type) {
    CAPTURE(static_cast<int>(type));
    const bytes frame = frame_of(model, chosen, layers, type);
    const auto view = lamina::decode<TestType>(frame, model);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      std::vector<TestType> restored(model.sizes()[l]);
      view.restore(l, restored);
      std::vector<TestType> walked;
      view.for_each_block(l, [&](std::size_t begin, std::span<const TestType> block) {
        REQUIRE(begin == walked.size());
        REQUIRE(block.size() == std::min<std::size_t>(4096, restored.size() - begin));
        if (type == payload_type::as_is) REQUIRE(block.data() == view.layer(l).data() + begin);
        walked.insert(walked.end(), block.begin(), block.end());
      });
      REQUIRE(same_bits(walked, restored));
    }
    chosen.clear();
    const bytes nothing = frame_of(model, chosen, layers, type);
    chosen.send_all();
    const auto fail = [](std::size_t, std::span<const TestType>) {
      FAIL("a layer that was not sent has no block");
    };
    lamina::decode<TestType>(nothing, model).for_each_block(1, fail);
    CHECK_THROWS_AS(view.for_each_block(5, fail), std::out_of_range);
  }
}

TEMPLATE_TEST_CASE("payload: bytes at any address are accepted unless they are viewed as they are", "", float,
                   double) {
  std::mt19937 random(319);
  const lamina::layout model = model_of({70, 200});
  lamina::selection chosen(model);
  chosen.send_all();
  tensors<TestType> layers;
  for (const std::size_t size : model.sizes()) layers.push_back(uneven_fractions<TestType>(random, size));
  for (const payload_type type : every_type) {
    const bytes frame = frame_of(model, chosen, layers, type);
    alignas(64) std::array<std::byte, 64 + 3000> buffer{};
    REQUIRE(64 + frame.size() <= buffer.size());
    for (std::size_t shift = 0; shift < 64; ++shift) {
      CAPTURE(shift);
      const auto shifted = std::span(buffer).subspan(shift, frame.size());
      std::ranges::copy(frame, shifted.begin());
      if (type == payload_type::as_is && shift % alignof(TestType) != 0) {
        CHECK(refusal<TestType>(shifted, model) == errc::misaligned_buffer);
        continue;
      }
      const auto view = lamina::decode<TestType>(shifted, model);
      for (std::size_t l = 0; l < 2; ++l) {
        std::vector<TestType> out(model.sizes()[l]);
        view.restore(l, out);
        CHECK(same_bits(out, type == payload_type::as_is ? layers[l] : round_trip(type, layers[l])));
      }
    }
  }
}

TEMPLATE_TEST_CASE("payload: every truncation and every flipped bit of an int8 frame is refused", "", float,
                   double) {
  std::mt19937 random(320);
  const lamina::layout model = model_of({3, 70, 5});
  lamina::selection chosen(model);
  chosen.send(0);
  chosen.send(1);
  tensors<TestType> layers;
  for (const std::size_t size : model.sizes()) layers.push_back(uneven_fractions<TestType>(random, size));
  for (const payload_type type : rounding_types) {
    bytes frame = frame_of(model, chosen, layers, type);
    const std::span<const std::byte> whole = frame;
    CHECK(refusal<TestType>(whole, model) == errc{});
    for (std::size_t size = 0; size < frame.size(); ++size) {
      REQUIRE(refusal<TestType>(whole.first(size), model) == errc::truncated);
    }
    bytes longer = frame;
    longer.push_back(std::byte{0});
    CHECK(refusal<TestType>(longer, model) == errc::trailing_bytes);
    for (std::size_t bit = 0; bit < 8 * frame.size(); ++bit) {
      const std::byte mask{static_cast<unsigned char>(1U << (bit % 8))};
      frame[bit / 8] ^= mask;
      CAPTURE(bit);
      REQUIRE(refusal<TestType>(frame, model) != errc{});
      frame[bit / 8] ^= mask;
    }
  }
}

TEST_CASE("payload: a frame of an unknown payload type is refused by that name") {
  const lamina::layout model = model_of({3});
  lamina::selection chosen(model);
  chosen.send_all();
  bytes frame = frame_of<float>(model, chosen, {{1, 2, 3}}, payload_type::int8);
  constexpr std::size_t place = offsetof(lamina::detail::wire_header, payload_type);
  REQUIRE(frame[place] == std::byte{3});
  for (int unknown = 5; unknown < 256; ++unknown) {
    frame[place] = static_cast<std::byte>(unknown);
    REQUIRE(refusal<float>(frame, model) == errc::unknown_payload_type);
  }
  // Another known type: the size then tells, before the checksum would.
  for (const int other : {0, 1, 2, 4}) {
    frame[place] = static_cast<std::byte>(other);
    REQUIRE(refusal<float>(frame, model) == errc::bad_payload_size);
  }
}

TEMPLATE_TEST_CASE("payload: the server's mean over mixed types is the mean of the decoded layers", "", float,
                   double) {
  std::mt19937 random(321);
  const lamina::layout model = model_of({3, 0, 64, 2 * 4096 + 70, 200, 9});
  for (int round = 0; round < 20; ++round) {
    const std::size_t workers = 1 + below(random, 5);
    lamina::server<TestType> server(model, {.workers = workers});
    std::vector<bytes> frames;
    for (std::size_t w = 0; w < workers; ++w) {
      tensors<TestType> layers;
      for (const std::size_t size : model.sizes()) layers.push_back(uneven_fractions<TestType>(random, size));
      lamina::selection chosen(model);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        if (l != 5 && random() % 3 != 0) chosen.send(l);
      }
      frames.push_back(
          frame_of(model, chosen, layers, every_type[(w + random()) % 4], 1, static_cast<std::uint32_t>(w)));
    }
    for (std::size_t w = workers; w-- > 0;) {
      const auto error = server.add(frames[w]);
      REQUIRE_FALSE(error);
    }
    const lamina::selection arrived = server.arrived();
    tensors<TestType> means(model.layers());
    server.update([&](std::size_t l, std::size_t begin, std::span<const TestType> block) {
      REQUIRE(begin == means[l].size());
      means[l].insert(means[l].end(), block.begin(), block.end());
    });
    for (std::size_t l = 0; l < model.layers(); ++l) {
      std::optional<std::vector<TestType>> expected;
      for (const bytes& frame : frames) {
        const auto view = lamina::decode<TestType>(frame, model);
        if (view.is_dropped(l)) continue;
        std::vector<TestType> layer(model.sizes()[l]);
        view.restore(l, layer);
        if (!expected) {
          expected = layer;
        } else {
          for (std::size_t i = 0; i < layer.size(); ++i) (*expected)[i] += layer[i];
        }
      }
      REQUIRE(arrived.is_sent(l) == expected.has_value());
      if (!expected) {
        REQUIRE(means[l].empty());
        continue;
      }
      for (TestType& each : *expected) each /= static_cast<TestType>(workers);
      REQUIRE(same_bits(means[l], *expected));
    }
  }
}

TEMPLATE_TEST_CASE("payload: what the receiver decodes plus the residual is the sum of the gradients", "",
                   float, double) {
  for (const payload_type type : every_type) {
    // 20,000 in 50 steps stays below 2^24; sums beyond 65,504 are cut by float16, those beyond 256 rounded by bfloat16.
    for (const std::size_t magnitude : {8, 300, 3000, 20'000}) {
      CAPTURE(static_cast<int>(type), magnitude);
      std::mt19937 random(static_cast<std::uint32_t>(330 + magnitude));
      const lamina::layout model = model_of({1, 63, 64, 65, 0, 4096 + 70, 300});
      lamina::worker<TestType> worker(model, {.drop_ratio = 0.6, .payload = type});
      auto computed = zeros_like<TestType>(model);
      auto received = computed;
      bool is_rounded = false;
      for (int t = 0; t < 50; ++t) {
        tensors<TestType> gradients;
        for (const std::size_t size : model.sizes()) {
          // A drift, so that layers that are dropped grow.
          gradients.push_back(random_integers<TestType>(random, size, magnitude / 2));
          for (TestType& each : gradients.back()) each += static_cast<TestType>(below(random, magnitude / 2));
        }
        add_to(computed, gradients);
        const bytes frame = send(worker, gradients);
        receive<TestType>(received, frame, model);
        REQUIRE(conserves(worker, received, computed));
        const auto view = lamina::decode<TestType>(frame, model);
        REQUIRE(view.payload() == type);
        for (std::size_t l = 0; l < model.layers(); ++l)
          is_rounded = is_rounded || (!view.is_dropped(l) && literal_sum_abs(worker.residual()[l]) != 0);
      }
      // The test would be empty where nothing is ever rounded.
      if (magnitude >= 3000) REQUIRE(is_rounded == (type != payload_type::as_is));
    }
  }
}

TEMPLATE_TEST_CASE("payload: a step that was not committed counts as lost, whatever its type", "", float,
                   double) {
  for (const payload_type type : rounding_types) {
    const lamina::layout model = model_of({2});
    lamina::worker<TestType> worker(model, {.drop_ratio = 0, .payload = type});
    {
      auto step = worker.add(tensors<TestType>{{1000, 4097}});
      const bytes first = step.frame().to_bytes();
      CHECK(step.frame().to_bytes() == first);
    }
    CHECK(residual_of(worker) == std::vector<TestType>{1000, 4097});
    auto received = zeros_like<TestType>(model);
    receive<TestType>(received, send(worker, {{1, 2}}), model);
    CHECK(conserves(worker, received, {{1001, 4099}}));
  }
}

namespace {

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

TEMPLATE_TEST_CASE("payload: parameters beyond a type's range become its largest, NaN and infinity stay", "",
                   float, double) {
  using limits = std::numeric_limits<TestType>;
  const TestType most = limits::max();
  const std::vector<TestType> given = {most,
                                       -most,
                                       TestType(1e10),
                                       TestType(0x1p30),
                                       1.5,
                                       limits::infinity(),
                                       -limits::infinity(),
                                       limits::quiet_NaN()};
  const auto halves = published(payload_type::float16, given);
  CHECK(std::vector<TestType>(halves.begin(), halves.begin() + 5) ==
        std::vector<TestType>{65504, -65504, 65504, 65504, 1.5});
  CHECK(halves[5] == limits::infinity());
  CHECK(halves[6] == -limits::infinity());
  CHECK(std::isnan(halves[7]));
  const auto brain = published(payload_type::bfloat16, given);
  const auto largest = static_cast<TestType>(lamina::to_float(lamina::bfloat16{0x7f7f}));
  CHECK(brain[0] == largest);
  CHECK(brain[1] == -largest);
  CHECK(brain[5] == limits::infinity());
  CHECK(std::isnan(brain[7]));

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
