// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/detail/rounding.hpp"

/// Arithmetic that gives the same bits wherever it is compiled: no product is fused with a sum.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// A value as memory would round it; on the device the sums that follow do not fuse (see lamina::detail::sum).
template <class T>
LAMINA_HOST_DEVICE T rounded(T value) {
#if !defined(__CUDA_ARCH__)
  return lamina::detail::rounded(value);
#else
  return value;
#endif
}

template <class T>
LAMINA_HOST_DEVICE T product(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 4) {
    return __fmul_rn(a, b);
  } else {
    return __dmul_rn(a, b);
  }
#else
  return rounded(a * b);
#endif
}

template <class T>
LAMINA_HOST_DEVICE bool is_finite(T x) {
#if defined(__CUDA_ARCH__)
  return std::abs(x) <=
         (std::numeric_limits<T>::max)();  // not of NaN; of the magnitude, which the value needs as well
#else
  return lamina::detail::is_finite_magnitude(std::abs(x));
#endif
}

/// Integers that order as the numbers do, with the two zeros as one; not of NaN.
constexpr std::uint64_t key_of(double value) {
  constexpr std::uint64_t sign = std::uint64_t{1} << 63U;
  const auto bits = std::bit_cast<std::uint64_t>(value == 0 ? 0.0 : value);
  return (bits & sign) != 0 ? ~bits : bits | sign;
}

constexpr double value_of(std::uint64_t key) {
  constexpr std::uint64_t sign = std::uint64_t{1} << 63U;
  return std::bit_cast<double>((key & sign) != 0 ? key & ~sign : ~key);
}

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
