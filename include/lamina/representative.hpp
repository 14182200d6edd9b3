// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/reduction.hpp"

/// The representative value q_l of a layer: the one number that is compared with the threshold. Each functor is called with a tensor and
/// gives a double; an empty tensor gives 0. Your own functor has map, combine and finish (see reduction.hpp) and gets the same fused pass.
namespace lamina::inline LAMINA_ABI {

namespace detail {

template <class Self>
struct callable_representative {
  template <class Tensor>
  double operator()(const Tensor& tensor) const {
    return representative_value(static_cast<const Self&>(*this), tensor);
  }
};

// Functions of single elements also run on a device, which knows no SIMD registers.
struct sum {
#if defined(__CUDA_ARCH__)
  // Additions that are not fused with a product before them.
  __device__ static float combine(float a, float b) {
    return __fadd_rn(a, b);
  }
  __device__ static double combine(double a, double b) {
    return __dadd_rn(a, b);
  }
#else
  LAMINA_HOST_DEVICE static float combine(float a, float b) {
    return a + b;
  }
  LAMINA_HOST_DEVICE static double combine(double a, double b) {
    return a + b;
  }
#endif
  template <simd_register V>
  static V combine(const V& a, const V& b) {
    return a + b;
  }
};

struct magnitude {
  using is_simd = void;
  using is_without_product = void;
  LAMINA_HOST_DEVICE static float map(float x) { return lamina::abs(x); }
  LAMINA_HOST_DEVICE static double map(double x) { return lamina::abs(x); }
  template <simd_register V>
  static V map(const V& x) {
    return lamina::abs(x);
  }
};

// least_magnitudes() is what the magnitudes of the elements add up to at least, which one pass tells the next one.
struct sum_of_magnitudes : sum, magnitude {
  static double least_magnitudes(double total) { return total; }
};

struct sum_of_squares : sum {
  // In double, where the square of a float is exact; registers of floats are not mapped.
  using is_simd = void;
  LAMINA_HOST_DEVICE static double map(double x) { return x * x; }
  static double least_magnitudes(double total) { return std::sqrt(total); }
  template <simd_register V>
  requires std::same_as<typename V::value_type, double>
  static V map(const V& x) { return x * x; }
};

}  // namespace detail

/// Mean of the absolute values; the default. Source: Lee et al. 2020, eq. 2, with absolute values, since a layer that drifts steadily
/// negative would never be sent otherwise.
struct mean_abs : detail::callable_representative<mean_abs>, detail::sum_of_magnitudes {
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t elements) {
    return total / static_cast<double>(elements);
  }
};

/// Sum of the absolute values, as Algorithm 1 of the paper has it: favours large layers.
struct l1_norm : detail::callable_representative<l1_norm>, detail::sum_of_magnitudes {
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t) { return total; }
};

/// Square root of the sum of squares.
struct l2_norm : detail::callable_representative<l2_norm>, detail::sum_of_squares {
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t) { return std::sqrt(total); }
};

/// Square root of the mean of squares.
struct root_mean_square : detail::callable_representative<root_mean_square>, detail::sum_of_squares {
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t elements) {
    return std::sqrt(total / static_cast<double>(elements));
  }
};

/// Largest absolute value; infinity if one of them is NaN.
struct max_abs : detail::callable_representative<max_abs>, detail::magnitude {
  // Of magnitudes, whose bits order as they do, with NaN beyond infinity.
  LAMINA_HOST_DEVICE static float combine(float a, float b) { return detail::larger_magnitude(a, b); }
  LAMINA_HOST_DEVICE static double combine(double a, double b) { return detail::larger_magnitude(a, b); }
  template <simd_register V>
  static V combine(const V& a, const V& b) {
    return detail::larger_magnitude(a, b);
  }
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t) { return detail::ordered_value(total); }
};

}  // namespace lamina::inline LAMINA_ABI
