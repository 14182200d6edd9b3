// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <vector>

#include "lamina/half.hpp"

/// NaN and infinity of each type of gradients, also where a compiler takes them for impossible.
namespace lamina_test {

// Numbers by their bits, out of the optimizer's sight.
template <class To, class Bits>
To number(Bits bits) {
  volatile Bits hidden = bits;
  const Bits seen = hidden;
  return std::bit_cast<To>(seen);
}

template <class G>
struct special;
template <>
struct special<float> {
  static float one() { return 1; }
  static std::vector<float> bad() {
    return {number<float>(0x7fc00000U), number<float>(0x7f800000U), number<float>(0xff800000U)};
  }
};
template <>
struct special<double> {
  static double one() { return 1; }
  static std::vector<double> bad() {
    return {number<double>(0x7ff8000000000000U), number<double>(0x7ff0000000000000U),
            number<double>(0xfff0000000000000U)};
  }
};
template <>
struct special<lamina::float16> {
  static lamina::float16 one() { return {0x3c00}; }
  static std::vector<lamina::float16> bad() { return {{0x7e00}, {0x7c00}, {0xfc00}}; }
};
template <>
struct special<lamina::bfloat16> {
  static lamina::bfloat16 one() { return {0x3f80}; }
  static std::vector<lamina::bfloat16> bad() { return {{0x7fc0}, {0x7f80}, {0xff80}}; }
};

}  // namespace lamina_test
