// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

#include "lamina/representative.hpp"

namespace lamina_test {

/// Mean of the signed values, a literal reading of the paper's eq. 2: a functor that is no magnitude, as a user may write one.
struct signed_mean : lamina::detail::callable_representative<signed_mean>, lamina::detail::sum {
  using is_simd = void;
  LAMINA_HOST_DEVICE static float map(float x) { return x; }
  LAMINA_HOST_DEVICE static double map(double x) { return x; }
  template <lamina::simd_register V>
  static V map(const V& x) {
    return x;
  }
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t elements) {
    return total / static_cast<double>(elements);
  }
};

}  // namespace lamina_test
