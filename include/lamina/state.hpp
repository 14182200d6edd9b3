// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/detail/checksum.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/kernels.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/error.hpp"
#include "lamina/layout.hpp"
#include "lamina/residual.hpp"
#include "lamina/selector.hpp"
#include "lamina/tensor.hpp"
#include "lamina/threshold.hpp"

/// A worker's memory as bytes, for a trainer's checkpoint: residual, velocity, threshold, ages, allowance and step. Little-
/// endian, with the layout's fingerprint and a checksum: bytes that are damaged, cut, or of another model are refused.
namespace lamina {

namespace detail {

inline constexpr std::uint32_t state_magic = 0x534d4cf5;  // the bytes F5 'L' 'M' 'S'

inline constexpr std::uint8_t state_flag_checksum = 1;
inline constexpr std::uint8_t state_flag_velocity = 2;

struct state_header {
  std::uint32_t magic = state_magic;
  std::uint16_t version = 1;
  std::uint8_t element_type = 0;
  std::uint8_t flags = 0;
  std::uint64_t fingerprint = 0;
  std::uint64_t layers = 0;
  std::uint64_t elements = 0;
  std::uint64_t step = 0;
  double threshold = 0;
  double allowance = 0;
  std::uint64_t checksum = 0;
};
static_assert(sizeof(state_header) == 64 && std::is_trivially_copyable_v<state_header>);

template <class Value>
void append(std::vector<std::byte>& bytes, std::span<const Value> values) {
  const std::size_t end = bytes.size();
  bytes.resize(end + values.size_bytes());
  if (!values.empty()) std::memcpy(bytes.data() + end, values.data(), values.size_bytes());
}

template <class Value>
Value value_at(std::span<const std::byte> bytes, std::size_t index) {
  Value value;
  std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
  return value;
}

template <class Value>
std::vector<Value> values_of(std::span<const std::byte> bytes) {
  std::vector<Value> values(bytes.size() / sizeof(Value));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// The header's own checksum field counts as zero.
inline std::uint64_t state_checksum(state_header header, std::span<const std::byte> body) {
  header.checksum = 0;
  checksum sum;
  sum.add(std::as_bytes(std::span(&header, 1)));
  sum.add(body);
  return sum.value();
}

template <element T>
std::vector<std::byte> write_state(const layout& model, const layer_selector::memory& memory,
                                   std::span<const T> elements, std::span<const T> velocity,
                                   std::uint64_t step) {
  std::vector<std::byte> bytes(sizeof(state_header));
  append(bytes, std::span<const std::uint64_t>(memory.cleared_in));
  append(bytes, elements);
  append(bytes, velocity);

  state_header header;
  header.element_type = element_code<T>;
  header.flags = static_cast<std::uint8_t>((checksum::available ? state_flag_checksum : 0) |
                                           (velocity.empty() ? 0 : state_flag_velocity));
  header.fingerprint = model.fingerprint();
  header.layers = model.layers();
  header.elements = model.elements();
  header.step = step;
  header.threshold = memory.threshold;
  header.allowance = memory.allowance;
  header.checksum = state_checksum(header, std::span(bytes).subspan(sizeof header));
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

// The parts of a state that was checked, in its bytes, where they need not be aligned.
struct state_view {
  state_header header;
  std::span<const std::byte> cleared_in;
  std::span<const std::byte> elements;
  std::span<const std::byte> velocity;

  bool has_velocity() const noexcept { return (header.flags & state_flag_velocity) != 0; }
};

inline std::string state_name(std::size_t index) {
  return "saved state " + std::to_string(index);
}

// `with_velocity` says whether there must be velocity; nothing: both will do. `name` stands in the errors.
template <element T>
state_view read_state(std::span<const std::byte> bytes, const layout& model,
                      std::optional<bool> with_velocity, const std::string& name) {
  const auto refuse_if = [&](bool bad, frame_errc code) {
    if (bad) throw decode_error(make_error_code(code), name);
  };
  state_view view;
  state_header& header = view.header;
  refuse_if(bytes.size() < sizeof header, frame_errc::truncated);
  std::memcpy(&header, bytes.data(), sizeof header);
  refuse_if(header.magic != state_magic, frame_errc::bad_magic);
  refuse_if(header.version != state_header{}.version, frame_errc::unsupported_version);
  refuse_if(header.element_type != element_code<T>, frame_errc::wrong_element_type);
  refuse_if((header.flags & ~(state_flag_checksum | state_flag_velocity)) != 0, frame_errc::nonzero_reserved);
  refuse_if(header.fingerprint != model.fingerprint() || header.layers != model.layers() ||
                header.elements != model.elements() ||
                view.has_velocity() != with_velocity.value_or(view.has_velocity()),
            frame_errc::wrong_layout);
  const bool has_checksum = (header.flags & state_flag_checksum) != 0;
  refuse_if(has_checksum && !checksum::available, frame_errc::checksum_unsupported);

  const auto body = bytes.subspan(sizeof header);
  const std::size_t ages_bytes = model.layers() * sizeof(std::uint64_t);
  const std::size_t elements_bytes = model.elements() * sizeof(T);
  const std::size_t expected = ages_bytes + (view.has_velocity() ? 2 : 1) * elements_bytes;
  // First by elements: the bytes of a model that fits in no memory may not fit in std::size_t.
  refuse_if(body.size() / sizeof(T) < model.elements() || body.size() < expected, frame_errc::truncated);
  refuse_if(body.size() > expected, frame_errc::trailing_bytes);
  refuse_if(header.checksum != (has_checksum ? state_checksum(header, body) : 0),
            frame_errc::checksum_mismatch);
  if (is_nan(header.threshold) || !is_finite(header.allowance)) {
    throw std::invalid_argument(name + ": the threshold or the allowance is not a number");
  }
  view.cleared_in = body.first(ages_bytes);
  view.elements = body.subspan(ages_bytes, elements_bytes);
  view.velocity = body.subspan(ages_bytes + elements_bytes);
  return view;
}

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
      throw std::invalid_argument(state_name(w) + " holds NaN or infinity");
    }
    throw std::invalid_argument("saved states: their sum overflows");
  }
  return means;
}

// How the next decide() of a resumed run finds its threshold, ages and allowance.
inline layer_selector::memory merge_memories(std::span<const state_view> states) {
  layer_selector::memory merged;
  merged.threshold = mean_over(states.size(), [&](std::size_t w) { return states[w].header.threshold; });
  merged.allowance = mean_over(states.size(), [&](std::size_t w) { return states[w].header.allowance; });
  merged.cleared_in = values_of<std::uint64_t>(states[0].cleared_in);
  for (const state_view& state : states) {
    if (state.header.threshold == invalid_threshold) merged.threshold = invalid_threshold;
    for (std::size_t l = 0; l < merged.cleared_in.size(); ++l) {
      merged.cleared_in[l] = std::min(merged.cleared_in[l], value_at<std::uint64_t>(state.cleared_in, l));
    }
  }
  // A budget may leave infinities of both signs; it finds a threshold anew before it uses one.
  if (is_nan(merged.threshold)) merged.threshold = invalid_threshold;
  if (!is_finite(merged.allowance)) throw std::invalid_argument("saved states: their sum overflows");
  return merged;
}

// Ranges of bytes that outlive the loop over them.
template <class States>
concept saved_states = std::ranges::input_range<const States> &&
    std::ranges::borrowed_range<std::ranges::range_reference_t<const States>> &&
    std::convertible_to<std::ranges::range_reference_t<const States>, std::span<const std::byte>>;

}  // namespace detail

/// The memory of a worker after step `step`, as bytes: 64, 8 a layer, and the residual and velocity in T. Cost: one copy.
/// gradient_compressor::save() calls it.
template <element T>
std::vector<std::byte> save_state(const residual_accumulator<T>& residual,
                                  const layer_selector::memory& memory, std::uint64_t step) {
  return detail::write_state<T>(residual.model(), memory, residual.elements(), residual.velocity(), step);
}

/// Puts the saved memory back and returns the step. Throws decode_error, and changes nothing, with the frame_errc that
/// says why; std::invalid_argument for numbers that are not finite.
template <element T>
std::uint64_t load_state(std::span<const std::byte> bytes, residual_accumulator<T>& residual,
                         layer_selector& selector) {
  const detail::state_view state =
      detail::read_state<T>(bytes, residual.model(), !residual.velocity().empty(), "saved state");
  layer_selector::memory memory{state.header.threshold, state.header.allowance,
                                detail::values_of<std::uint64_t>(state.cleared_in)};
  residual.restore(detail::values_of<T>(state.elements), detail::values_of<T>(state.velocity));
  selector.restore(std::move(memory));
  return state.header.step;
}

/// One state for a run that goes on with another number of workers. When each of W' workers loads it in place of the W
/// that were saved, what all of them together still have to contribute to the update, (1/W) Σ_w a_w, is the same.
///
/// Residual, velocity, allowance and threshold are the means, summed in the order of the workers, the first two in T. What
/// all states agree on stays as it is. If one state's threshold is the invalid one, so is this one's. For each layer the
/// earliest of the steps in which it was last sent counts, so that none waits for longer than max_age.
///
/// \param states  what each of the W workers saved, all after the same step: a range of ranges of bytes, such as
///                std::vector<std::vector<std::byte>>
/// \param parts   what the workers decide on: gradient_compressor::parts(), or partition::parts() of the same model
/// \return the state, for gradient_compressor::load
/// \throws decode_error           as load_state, for the first state that is refused, named by its index; wrong_layout
///                                also for one with velocity where state 0 has none, or the other way round
/// \throws std::invalid_argument  no states; states of two steps; numbers that are not finite, or whose sum is not
///
/// Exact where neither the sums nor the division by W round, as with W a power of two and integers. Cost: one read of
/// the states, two with checksums, and twice the memory of one.
template <element T, detail::saved_states States>
std::vector<std::byte> merge_states(const States& states, const layout& parts) {
  std::vector<detail::state_view> views;
  for (const std::span<const std::byte> bytes : states) {
    std::optional<bool> with_velocity;
    if (!views.empty()) with_velocity = views[0].has_velocity();
    views.push_back(detail::read_state<T>(bytes, parts, with_velocity, detail::state_name(views.size())));
    if (views.back().header.step != views[0].header.step) {
      throw std::invalid_argument(
          detail::state_name(0) + " is of step " + std::to_string(views[0].header.step) + ", " +
          detail::state_name(views.size() - 1) + " of step " + std::to_string(views.back().header.step));
    }
  }
  if (views.empty()) throw std::invalid_argument("there is no saved state to merge");
  return detail::write_state<T>(
      parts, detail::merge_memories(views), detail::mean_over<T>(views, &detail::state_view::elements),
      detail::mean_over<T>(views, &detail::state_view::velocity), views[0].header.step);
}

}  // namespace lamina
