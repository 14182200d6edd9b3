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
G one() {
  if constexpr (lamina::half_element<G>) {
    return lamina::saturating_round<G>(1);
  } else {
    return 1;
  }
}

template <class G>
std::vector<G> not_finite() {
  if constexpr (std::is_same_v<G, float>) {
    return {number<float>(0x7fc00000U), number<float>(0x7f800000U), number<float>(0xff800000U)};
  } else if constexpr (std::is_same_v<G, double>) {
    return {number<double>(0x7ff8000000000000U), number<double>(0x7ff0000000000000U),
            number<double>(0xfff0000000000000U)};
  } else if constexpr (std::is_same_v<G, lamina::float16>) {
    return {{0x7e00}, {0x7c00}, {0xfc00}};
  } else {
    return {{0x7fc0}, {0x7f80}, {0xff80}};
  }
}

}  // namespace lamina_test
