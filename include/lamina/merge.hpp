// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/layout.hpp"
#include "lamina/state.hpp"
#include "lamina/tensor.hpp"
#include "lamina/threshold.hpp"

/// Saved states of many workers as one: elastic restarts.
namespace lamina::inline LAMINA_ABI {

namespace detail {

// The mean of one quantity over W states, value_of(w) being what state w has. Where all agree it is that value, which
// the sum over W, rounded, need not give back.
template <class Value>
auto mean_over(std::size_t states, const Value& value_of) {
  const auto first = value_of(0);
  auto sum = first;
  using bits = bits_of<decltype(sum)>;
  bool all_agree = true;
  for (std::size_t w = 1; w < states; ++w) {
    const auto value = value_of(w);
    sum += value;
    // Bits, since NaN equals everything under -ffast-math.
    all_agree &= std::bit_cast<bits>(value) == std::bit_cast<bits>(first);
  }
  return all_agree ? first : sum / static_cast<decltype(sum)>(states);
}

// The same for each number of one part of the states.
template <element T>
std::vector<T> mean_over(std::span<const state_view> states, std::span<const std::byte> state_view::*part) {
  std::vector<T> means((states[0].*part).size() / sizeof(T));
  for (std::size_t i = 0; i < means.size(); ++i) {
    const auto number_of = [&](std::size_t w) { return value_at<T>(states[w].*part, i); };
    means[i] = mean_over(states.size(), number_of);
    if (all_finite<T>(std::array{means[i]})) continue;
    for (std::size_t w = 0; w < states.size(); ++w) {
      if (all_finite<T>(std::array{number_of(w)})) continue;
      detail::raise(std::invalid_argument(state_name(w) + " holds NaN or infinity"));
    }
    detail::raise(std::invalid_argument("saved states: their sum overflows"));
  }
  return means;
}

// How the next decide() of a resumed run finds its threshold, ages and allowance. A template, so that it costs nothing where
// nobody merges.
template <class View>
selector::memory merge_memories(std::span<const View> states) {
  selector::memory merged;
  merged.threshold = mean_over(states.size(), [&](std::size_t w) { return states[w].header.threshold; });
  merged.allowance = mean_over(states.size(), [&](std::size_t w) { return states[w].header.allowance; });
  merged.sent_in = values_of<std::uint64_t>(states[0].sent_in);
  for (const View& state : states) {
    if (state.header.threshold == invalid_threshold) merged.threshold = invalid_threshold;
    for (std::size_t l = 0; l < merged.sent_in.size(); ++l)
      merged.sent_in[l] = (std::min)(merged.sent_in[l], value_at<std::uint64_t>(state.sent_in, l));
  }
  // Infinities of both signs, as a budget leaves them. One that is infinite is not used: the next step searches.
  if (is_nan(merged.threshold)) merged.threshold = infinite_value;
  if (!is_finite(merged.allowance)) detail::raise(std::invalid_argument("saved states: their sum overflows"));
  return merged;
}

// None, unless all states have them. Infinite ones, of workers before their first step, stay so.
inline std::vector<double> mean_expected(std::span<const state_view> states) {
  std::vector<double> means(states[0].expected.size() / sizeof(double));
  for (const state_view& state : states) {
    if (state.expected.size() != states[0].expected.size()) return {};
  }
  for (std::size_t f = 0; f < means.size(); ++f)
    means[f] =
        mean_over(states.size(), [&](std::size_t w) { return value_at<double>(states[w].expected, f); });
  return means;
}

// Ranges of bytes that outlive the loop over them.
template <class States>
concept saved_states = some_range<const States> && requires(const States& states) {
  { *std::begin(states) } -> std::convertible_to<std::span<const std::byte>>;
  requires std::is_lvalue_reference_v<decltype(*std::begin(states))> ||
      std::ranges::enable_borrowed_range<std::remove_cvref_t<decltype(*std::begin(states))>>;
};

}  // namespace detail

/// One state for a run that goes on with another number of workers. When each of W' workers loads it in place of the W
/// that were saved, what all of them together still have to contribute to the update, (1/W) Σ_w a_w, is the same.
///
/// Residual, velocity, allowance, threshold and expected values are the means, summed in the order of the workers, the first two in T. What
/// all states agree on stays as it is. If one state's threshold is the invalid one, so is this one's. For each layer the
/// earliest of the steps in which it was last sent counts, so that none is dropped for longer than at_least_every.
///
/// \param states  what each of the W workers saved, all after the same step: a range of ranges of bytes, such as
///                std::vector<std::vector<std::byte>>
/// \param parts   what the workers decide on: worker::fragments()
/// \return the state, for worker::load
/// \throws decode_error           as worker::load, for the first state that is refused, named by its index; other_momentum
///                                for one with velocity where state 0 has none, or the other way round
/// \throws std::invalid_argument  no states; states of two steps; numbers that are not finite, or whose sum is not
///
/// Exact where neither the sums nor the division by W round, as with W a power of two and integers. Cost: one read of
/// the states, two with checksums, and twice the memory of one.
template <element T, detail::saved_states States>
std::vector<std::byte> merge_states(const States& states, const layout& parts) {
  std::vector<detail::state_view> views;
  for (const std::span<const std::byte> bytes : states) {
    std::optional<bool> as_first;
    if (!views.empty()) as_first = views[0].has_velocity();
    views.push_back(detail::read_state<T>(bytes, parts, as_first, detail::state_name(views.size())));
    if (views.back().header.step != views[0].header.step) {
      detail::raise(std::invalid_argument(
          detail::state_name(0) + " is of step " + std::to_string(views[0].header.step) + ", " +
          detail::state_name(views.size() - 1) + " of step " + std::to_string(views.back().header.step)));
    }
  }
  if (views.empty()) detail::raise(std::invalid_argument("there is no saved state to merge"));
  return detail::write_state<T>(parts, detail::merge_memories(std::span<const detail::state_view>(views)),
                                detail::mean_over<T>(views, &detail::state_view::elements),
                                detail::mean_over<T>(views, &detail::state_view::velocity),
                                views[0].header.step,
                                detail::mean_expected(std::span<const detail::state_view>(views)));
}

}  // namespace lamina::inline LAMINA_ABI
