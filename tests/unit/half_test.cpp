// SPDX-License-Identifier: MIT
#include "lamina/half.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

#include "catch.hpp"
#include "support.hpp"

using lamina::bfloat16;
using lamina::float16;
using lamina::saturating_round;
using lamina::to_float;
using namespace lamina_test;

namespace {

std::uint32_t bits(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

template <class Half>
constexpr std::uint16_t largest_pattern = std::same_as<Half, float16> ? 0x7bff : 0x7f7f;

template <class Half>
bool is_finite(Half half) {
  return (half.bits & 0x7fffU) <= largest_pattern<Half>;
}

template <class Half>
Half pattern(std::uint32_t bits_of_half) {
  return {static_cast<std::uint16_t>(bits_of_half)};
}

#if defined(__FLT16_MAX__)
__extension__ typedef _Float16 native_half;

native_half native(float16 half) {
  native_half value;
  std::memcpy(&value, &half, sizeof value);
  return value;
}
std::uint16_t bits(native_half value) {
  std::uint16_t pattern_of_value = 0;
  std::memcpy(&pattern_of_value, &value, sizeof value);
  return pattern_of_value;
}
#endif

// A finite float with any sign, exponent and mantissa.
float random_float(std::mt19937& random) {
  for (;;) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (std::isfinite(value)) return value;
  }
}

static_assert(to_float(float16{0x3c00}) == 1.0F);
static_assert(to_float(bfloat16{0x3f80}) == 1.0F);
static_assert(saturating_round<float16>(-1.5F) == float16{0xbe00});
static_assert(saturating_round<bfloat16>(-1.5F) == bfloat16{0xbfc0});
static_assert(sizeof(float16) == 2 && sizeof(bfloat16) == 2);

}  // namespace

TEST_CASE("half: float16 to float is what the compiler's _Float16 gives, for all patterns") {
#if defined(__FLT16_MAX__)
  for (std::uint32_t p = 0; p < 0x10000; ++p) {
    const auto half = pattern<float16>(p);
    const float ours = to_float(half);
    const auto theirs = static_cast<float>(native(half));
    CAPTURE(p);
    if (std::isnan(theirs)) {
      constexpr std::uint32_t quiet = 0x400000;  // set by the compiler's conversion, kept as it is by ours
      REQUIRE((bits(ours) | quiet) == (bits(theirs) | quiet));
      REQUIRE(std::isnan(ours));
    } else {
      REQUIRE(bits(ours) == bits(theirs));
    }
  }
#else
  WARN("half: skipped, this compiler has no _Float16");
#endif
}

TEST_CASE("half: float16 to float is what the format says, for all patterns") {
  for (std::uint32_t p = 0; p < 0x10000; ++p) {
    const int exponent = static_cast<int>((p >> 10) & 31);
    const int mantissa = static_cast<int>(p & 1023);
    const float sign = (p & 0x8000) != 0 ? -1.0F : 1.0F;
    const float value = to_float(pattern<float16>(p));
    CAPTURE(p);
    if (exponent == 31) {
      REQUIRE(std::isinf(value) == (mantissa == 0));
      REQUIRE(std::isnan(value) == (mantissa != 0));
      REQUIRE(std::signbit(value) == (sign < 0));
    } else {
      const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                            : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
      REQUIRE(bits(value) == bits(sign * magnitude));
    }
  }
}

TEST_CASE("half: bfloat16 to float is the upper half of its bits, for all patterns") {
  for (std::uint32_t p = 0; p < 0x10000; ++p) REQUIRE(bits(to_float(pattern<bfloat16>(p))) == p << 16);
}

TEMPLATE_TEST_CASE("half: a row at a time gives the bits of to_float, for all patterns", "", float16,
                   bfloat16) {
  std::array<TestType, 64> from;
  std::array<float, 64> singles;
  std::array<double, 64> doubles;
  for (std::uint32_t p = 0; p < 0x10000; p += 64) {
    for (std::uint32_t i = 0; i < 64; ++i) from[i] = pattern<TestType>(p + i);
    lamina::detail::widen_all<64>(from.data(), singles.data());
    lamina::detail::widen_all<64>(from.data(), doubles.data());
    for (std::uint32_t i = 0; i < 64; ++i) {
      const float expected = to_float(from[i]);
      CAPTURE(p + i);
      if (std::isnan(expected)) {
        constexpr std::uint32_t quiet = 0x400000;  // set by F16C's instruction
        REQUIRE((bits(singles[i]) | quiet) == (bits(expected) | quiet));
        REQUIRE(std::isnan(doubles[i]));
      } else {
        REQUIRE(bits(singles[i]) == bits(expected));
        REQUIRE(same_bits(doubles[i], static_cast<double>(expected)));
      }
    }
  }
}

TEMPLATE_TEST_CASE("half: every finite pattern survives the way to float and back", "", float16, bfloat16) {
  for (std::uint32_t p = 0; p < 0x10000; ++p) {
    const auto half = pattern<TestType>(p);
    if (is_finite(half)) REQUIRE(saturating_round<TestType>(to_float(half)).bits == half.bits);
  }
}

TEMPLATE_TEST_CASE("half: rounds to nearest, a tie to the even pattern, of both signs", "", float16,
                   bfloat16) {
  for (std::uint32_t p = 0; p < largest_pattern<TestType>; ++p) {
    const double below_it = to_float(pattern<TestType>(p));
    const double above_it = to_float(pattern<TestType>(p + 1));
    const auto tie = static_cast<float>((below_it + above_it) / 2);
    REQUIRE(static_cast<double>(tie) == (below_it + above_it) / 2);
    const float infinity = std::numeric_limits<float>::infinity();
    const std::uint32_t even = p + (p & 1);
    CAPTURE(p);
    REQUIRE(saturating_round<TestType>(tie).bits == even);
    REQUIRE(saturating_round<TestType>(std::nextafter(tie, infinity)).bits == p + 1);
    REQUIRE(saturating_round<TestType>(std::nextafter(tie, -infinity)).bits == p);
    REQUIRE(saturating_round<TestType>(-tie).bits == (even | 0x8000));
    REQUIRE(saturating_round<TestType>(-std::nextafter(tie, infinity)).bits == ((p + 1) | 0x8000));
    REQUIRE(saturating_round<TestType>(-std::nextafter(tie, -infinity)).bits == (p | 0x8000));
  }
}

TEMPLATE_TEST_CASE("half: what is beyond the largest number becomes it, never infinity", "", float16,
                   bfloat16) {
  const float largest_float = std::numeric_limits<float>::max();
  const float largest_half = to_float(TestType{largest_pattern<TestType>});
  std::vector<float> beyond = {std::nextafter(largest_half, largest_float), largest_float};
  if (std::same_as<TestType, float16>) {
    beyond.insert(beyond.end(), {65519.99F, 65520.0F, 65536.0F, 131008.0F, 1e6F, 1e10F, 1e38F});
  } else {
    beyond.insert(beyond.end(), {std::bit_cast<float>(0x7f7f7fffU), std::bit_cast<float>(0x7f7f8000U),
                                 std::bit_cast<float>(0x7f7f8001U)});
  }
  for (const float value : beyond) {
    CAPTURE(value);
    CHECK(saturating_round<TestType>(value).bits == largest_pattern<TestType>);
    CHECK(saturating_round<TestType>(-value).bits == (largest_pattern<TestType> | 0x8000));
  }
  std::mt19937 random(301);
  for (int i = 0; i < 200'000; ++i) {
    const float value = random_float(random);
    const auto half = saturating_round<TestType>(value);
    REQUIRE(is_finite(half));
    REQUIRE(std::signbit(to_float(half)) == std::signbit(value));
    if (std::abs(value) > largest_half) REQUIRE(std::abs(to_float(half)) == largest_half);
  }
}

TEST_CASE("half: float16 denormals and what vanishes below them") {
  const auto rounded = [](float value) { return saturating_round<float16>(value).bits; };
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(rounded(0.0F) == 0);
  CHECK(rounded(-0.0F) == 0x8000);
  CHECK(rounded(std::numeric_limits<float>::denorm_min()) == 0);
  CHECK(rounded(-std::numeric_limits<float>::denorm_min()) == 0x8000);
  CHECK(rounded(std::numeric_limits<float>::min()) == 0);
  CHECK(rounded(0x1p-25F) == 0);  // a tie with 0
  CHECK(rounded(std::nextafter(0x1p-25F, infinity)) == 1);
  CHECK(rounded(0x1p-24F) == 1);
  CHECK(rounded(0x1.8p-24F) == 2);  // a tie of 1 and 2
  CHECK(rounded(0x1.4p-23F) == 2);  // a tie of 2 and 3
  CHECK(rounded(0x1.ff8p-15F) == 0x3ff);
  CHECK(rounded(0x1.ffcp-15F) == 0x400);  // a tie of the largest denormal and the smallest normal
  CHECK(rounded(std::nextafter(0x1p-14F, 0.0F)) == 0x400);
  CHECK(rounded(0x1p-14F) == 0x400);
}

TEST_CASE("half: bfloat16 denormals are the upper halves of float's") {
  const auto rounded = [](std::uint32_t bits_of_float) {
    return saturating_round<bfloat16>(std::bit_cast<float>(bits_of_float)).bits;
  };
  CHECK(rounded(0) == 0);
  CHECK(rounded(0x80000000U) == 0x8000);
  CHECK(rounded(1) == 0);
  CHECK(rounded(0x8000) == 0);  // a tie with 0
  CHECK(rounded(0x8001) == 1);
  CHECK(rounded(0x18000) == 2);  // a tie of 1 and 2
  CHECK(rounded(0x28000) == 2);
  CHECK(rounded(0x7f8000) == 0x80);  // a tie of the largest denormal and the smallest normal
  CHECK(rounded(0x807f7fffU) == 0x807f);
}

TEST_CASE("half: saturating_round to float16 is the compiler's conversion, but for infinity") {
#if defined(__FLT16_MAX__)
  std::mt19937 random(302);
  const auto require_same = [](float value) {
    const std::uint16_t theirs = bits(static_cast<native_half>(value));
    const bool overflowed = (theirs & 0x7fffU) == 0x7c00U;
    CAPTURE(value);
    REQUIRE(saturating_round<float16>(value).bits == (overflowed ? theirs - 1 : theirs));
  };
  for (int i = 0; i < 300'000; ++i) {
    require_same(random_float(random));
    // Most of them in and around the range of float16: exponents from 2^-30 to 2^20.
    const auto mantissa = static_cast<float>(random()) * 0x1p-32F + 0.5F;
    const float near_by = std::ldexp(mantissa, static_cast<int>(below(random, 51)) - 30);
    require_same(near_by);
    require_same(-near_by);
  }
#else
  WARN("half: skipped, this compiler has no _Float16");
#endif
}

TEST_CASE("half: saturating_round to bfloat16 is no further away than either neighbour") {
  std::mt19937 random(303);
  for (int i = 0; i < 300'000; ++i) {
    const float value = random_float(random);
    const auto half = saturating_round<bfloat16>(value);
    const double distance = std::abs(double(to_float(half)) - double(value));
    CAPTURE(value);
    for (const int step : {-1, 1}) {
      const auto neighbour = pattern<bfloat16>(static_cast<std::uint32_t>(half.bits + step));
      if (!is_finite(neighbour) || (half.bits & 0x7fffU) == 0) continue;
      REQUIRE(distance <= std::abs(double(to_float(neighbour)) - double(value)));
    }
  }
}
