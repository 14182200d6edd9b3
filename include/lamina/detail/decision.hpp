// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"

/// What decides whether a layer goes out: one text, which host and device both run.
namespace lamina::inline LAMINA_ABI::detail {

/// What the caller says of a layer, or part, whatever its value.
enum class layer_rule : std::uint8_t {
  by_value,
  always,  ///< sent in every step: worker_options::always_sent
  held,    ///< not sent in this step: select(agreed, held)
};

inline constexpr double infinite_value = std::numeric_limits<double>::infinity();

/// A value as the threshold sees it: NaN counts as infinity, so that its layer goes out first and does not wait for ever.
LAMINA_HOST_DEVICE constexpr double ordered_value(double value) {
  // By bits, for -ffast-math, and by a builtin, since functions of the standard library are the host's alone.
  const auto bits = __builtin_bit_cast(std::uint64_t, value);
  const bool is_not_a_number = (bits & ~(std::uint64_t{1} << 63U)) > infinity_bits;
  return is_not_a_number ? infinite_value : value;  // NOLINT: clang-tidy 14 takes infinity for narrowed
}

/// The same in the search for R: a layer that is held is the first to be dropped, one that is always sent the last.
LAMINA_HOST_DEVICE constexpr double search_value(double value, layer_rule rule) {
  if (rule == layer_rule::held) return -infinite_value;
  if (rule == layer_rule::always) return infinite_value;
  return ordered_value(value);
}

/// Whether a threshold that was searched may serve a later step, which does not search. One of infinity may not: layers that are held, or
/// always sent, were more than the search could part, and it would drop, or send, everything from then on. One of 0 may not: more
/// than R of the elements were 0, as gradients of a network that begins with zeros are, and once they are not it would send everything.
LAMINA_HOST_DEVICE constexpr bool outlasts_its_step(double threshold) {
  const std::uint64_t magnitude = __builtin_bit_cast(std::uint64_t, threshold) & ~(std::uint64_t{1} << 63U);
  return magnitude != 0 && magnitude < infinity_bits;
}

/// Elements that a budget allows in a step: what was left over and this step's share, at most one step's share and the largest layer.
LAMINA_HOST_DEVICE constexpr double grown_allowance(double allowance, double share,
                                                    std::size_t largest_layer) {
  const double most = share + static_cast<double>(largest_layer);
  return allowance + share < most ? allowance + share : most;
}

/// What is left of an allowance for layers that their values decide on: those that are always sent come first, and layers that max_age
/// forced out may have left less than nothing.
LAMINA_HOST_DEVICE constexpr double allowance_by_value(double allowance, std::size_t always_sent_elements) {
  const double left = allowance - static_cast<double>(always_sent_elements);
  return left > 0 ? left : 0;
}

/// Whether a layer goes out for its age alone, `cleared_in` being the step in which it was sent last.
LAMINA_HOST_DEVICE constexpr bool is_overdue(std::uint64_t step, std::uint64_t cleared_in,
                                             std::uint64_t max_age) {
  return max_age > 0 && step - cleared_in >= max_age;
}

/// The decision of one step, once its threshold is known.
struct step_decision {
  std::uint64_t step = 0;                                 // counted from 1
  double threshold = 0;                                   // λ
  std::uint64_t max_age = 0;                              // 0: none
  bool sends_all = false;                                 // R = 0, or R = 1 without a threshold of the user's
  std::size_t equals_end = static_cast<std::size_t>(-1);  // layers of value λ go out below this index

  /// Whether a layer goes out. A value of 0 sends nothing, whatever the threshold: it would be 0 where such layers hold more than R, and
  /// everything would go out.
  LAMINA_HOST_DEVICE constexpr bool sends(std::size_t layer, double value, std::size_t elements,
                                          std::uint64_t cleared_in, layer_rule rule) const {
    if (elements == 0 || rule == layer_rule::held) return false;
    if (sends_all || rule == layer_rule::always) return true;
    if (is_overdue(step, cleared_in, max_age)) return true;
    // By bits: -ffast-math takes NaN for 0.
    if ((__builtin_bit_cast(std::uint64_t, value) << 1U) == 0) return false;
    const double ordered = ordered_value(value);
    return ordered > threshold || (ordered == threshold && layer < equals_end);
  }
};

}  // namespace lamina::inline LAMINA_ABI::detail
