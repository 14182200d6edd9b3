// SPDX-License-Identifier: MIT
#include "lamina/half.hpp"

#include <cmath>

#include "catch.hpp"
#include "support.hpp"

namespace lamina_test::half_test {

using lamina::bfloat16;
using lamina::float16;
using lamina::saturating_round;
using lamina::to_float;

namespace {

std::uint32_t bits(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

template <class Half>
constexpr std::uint16_t largest_pattern = std::same_as<Half, float16> ? 0x7bff : 0x7f7f;

template <class Half>
Half pattern(std::uint32_t bits_of_half) {
  return {static_cast<std::uint16_t>(bits_of_half)};
}

static_assert(to_float(float16{0x3c00}) == 1.0F);
static_assert(to_float(bfloat16{0x3f80}) == 1.0F);
static_assert(saturating_round<float16>(-1.5F) == float16{0xbe00});
static_assert(saturating_round<bfloat16>(-1.5F) == bfloat16{0xbfc0});
static_assert(sizeof(float16) == 2 && sizeof(bfloat16) == 2);

}  // namespace

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

TEMPLATE_TEST_CASE("half: rounds to nearest, a tie to the even pattern", "", float16, bfloat16) {
  for (std::uint32_t p = 0; p < largest_pattern<TestType>; ++p) {
    const double below_it = to_float(pattern<TestType>(p));
    const double above_it = to_float(pattern<TestType>(p + 1));
    const auto tie = static_cast<float>((below_it + above_it) / 2);
    REQUIRE(static_cast<double>(tie) == (below_it + above_it) / 2);
    const float infinity = std::numeric_limits<float>::infinity();
    const std::uint32_t even = p + (p & 1);
    CAPTURE(p);
    REQUIRE(saturating_round<TestType>(to_float(pattern<TestType>(p))).bits == p);
    REQUIRE(saturating_round<TestType>(tie).bits == even);
    REQUIRE(saturating_round<TestType>(std::nextafter(tie, infinity)).bits == p + 1);
    REQUIRE(saturating_round<TestType>(std::nextafter(tie, -infinity)).bits == p);
    REQUIRE(saturating_round<TestType>(-tie).bits == (even | 0x8000));
    REQUIRE(saturating_round<TestType>(-std::nextafter(tie, infinity)).bits == ((p + 1) | 0x8000));
    REQUIRE(saturating_round<TestType>(-std::nextafter(tie, -infinity)).bits == (p | 0x8000));
  }
}

TEMPLATE_TEST_CASE("half: what is beyond the largest number becomes it", "", float16, bfloat16) {
  const float largest_float = std::numeric_limits<float>::max();
  const float largest_half = to_float(TestType{largest_pattern<TestType>});
  // Of float16 also where infinity would begin, and far beyond it.
  std::vector<float> beyond = {std::nextafter(largest_half, largest_float), largest_float};
  if (std::same_as<TestType, float16>)
    beyond.insert(beyond.end(), {65519.99F, 65520.0F, 65536.0F, 131008.0F, 1e38F});
  if (std::same_as<TestType, bfloat16>) beyond.push_back(std::bit_cast<float>(0x7f7f8000U));
  for (const float value : beyond) {
    CAPTURE(value);
    CHECK(saturating_round<TestType>(value).bits == largest_pattern<TestType>);
    CHECK(saturating_round<TestType>(-value).bits == (largest_pattern<TestType> | 0x8000));
  }
}

}  // namespace lamina_test::half_test
