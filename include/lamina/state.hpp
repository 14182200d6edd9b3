// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "lamina/decision.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/checksum.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/error.hpp"
#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"

/// A worker's memory as bytes, for a checkpoint: little-endian, with the layout's fingerprint and a checksum. worker::save() and
/// load() call this; merge.hpp makes one state of several.
namespace lamina::inline LAMINA_ABI::detail {

inline constexpr std::uint32_t state_magic = 0x534d4cf5;  // the bytes F5 'L' 'M' 'S'

inline constexpr std::uint8_t state_flag_checksum = 1;
inline constexpr std::uint8_t state_flag_velocity = 2;
inline constexpr std::uint8_t state_flag_expected = 4;

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

// Writes the header into the first bytes: what it does not say yet, and a checksum over all that follows.
template <element T>
void seal_state(std::vector<std::byte>& bytes, state_header header, const layout& model,
                const selector::memory& memory, std::uint64_t step) {
  header.element_type = element_code<T>;
  header.flags = static_cast<std::uint8_t>(header.flags | state_flag_checksum);
  header.fingerprint = model.fingerprint();
  header.layers = model.layers();
  header.step = step;
  header.threshold = memory.threshold;
  header.allowance = memory.allowance;
  header.checksum = state_checksum(header, std::span(bytes).subspan(sizeof header));
  std::memcpy(bytes.data(), &header, sizeof header);
}

template <element T>
std::vector<std::byte> write_state(const layout& model, const selector::memory& memory,
                                   std::span<const T> elements, std::span<const T> velocity,
                                   std::uint64_t step, std::span<const double> expected) {
  std::vector<std::byte> bytes(sizeof(state_header));
  append(bytes, std::span<const std::uint64_t>(memory.sent_in));
  append(bytes, expected);
  append(bytes, elements);
  append(bytes, velocity);

  state_header header;
  header.flags = static_cast<std::uint8_t>((velocity.empty() ? 0 : state_flag_velocity) |
                                           (expected.empty() ? 0 : state_flag_expected));
  header.elements = model.elements();
  seal_state<T>(bytes, header, model, memory, step);
  return bytes;
}

// The parts of a state that was checked, in its bytes, where they need not be aligned.
struct state_view {
  state_header header;
  std::span<const std::byte> sent_in;
  std::span<const std::byte> expected;
  std::span<const std::byte> elements;
  std::span<const std::byte> velocity;

  bool has_velocity() const noexcept { return (header.flags & state_flag_velocity) != 0; }
  selector::memory memory() const {
    return {header.threshold, header.allowance, values_of<std::uint64_t>(sent_in)};
  }
};

inline std::string state_name(std::size_t index) {
  return "saved state " + std::to_string(index);
}

// The header of such bytes, if its fields are those of `model`; its flags are for the caller to judge. `refuse_if(bad, code)`
// throws.
template <class RefuseIf>
state_header read_state_header(std::span<const std::byte> bytes, std::uint32_t magic,
                               std::uint8_t element_type, const layout& model, const RefuseIf& refuse_if) {
  state_header header;
  refuse_if(bytes.size() < sizeof header, errc::truncated);
  std::memcpy(&header, bytes.data(), sizeof header);
  refuse_if(header.magic != magic, errc::bad_magic);
  refuse_if(header.version == 0 || header.version > state_header{}.version, errc::unsupported_version);
  refuse_if(header.element_type != element_type, errc::wrong_element_type);
  refuse_if(header.fingerprint != model.fingerprint() || header.layers != model.layers(), errc::wrong_layout);
  return header;
}

template <class RefuseIf>
void check_state_checksum(const state_header& header, std::span<const std::byte> body,
                          const RefuseIf& refuse_if) {
  const bool has_checksum = (header.flags & state_flag_checksum) != 0;
  refuse_if(header.checksum != (has_checksum ? state_checksum(header, body) : 0), errc::checksum_mismatch);
}

inline void check_selector_numbers(const state_header& header, const std::string& name) {
  if (is_nan(header.threshold) || !is_finite(header.allowance))
    raise(std::invalid_argument(name + ": the threshold or the allowance is not a number"));
}

// `has_velocity` says whether the state must hold velocity, or must not; `name` stands in the errors.
template <element T>
state_view read_state(std::span<const std::byte> bytes, const layout& model, std::optional<bool> has_velocity,
                      const std::string& name) {
  const auto refuse_if = [&](bool bad, errc code) {
    if (bad) detail::raise(decode_error(make_error_code(code), name));
  };
  state_view view;
  state_header& header = view.header;
  header = read_state_header(bytes, state_magic, element_code<T>, model, refuse_if);
  constexpr unsigned known_state_flags = state_flag_checksum | state_flag_velocity | state_flag_expected;
  refuse_if((header.flags & ~known_state_flags) != 0, errc::nonzero_reserved);
  refuse_if(header.elements != model.elements(), errc::wrong_layout);
  refuse_if(view.has_velocity() != has_velocity.value_or(view.has_velocity()), errc::other_momentum);

  const auto body = bytes.subspan(sizeof header);
  const bool has_expected = (header.flags & state_flag_expected) != 0;
  const std::size_t number_bytes = model.layers() * sizeof(std::uint64_t);
  const std::size_t ages_bytes = (has_expected ? 2 : 1) * number_bytes;
  const std::size_t elements_bytes = model.elements() * sizeof(T);
  const std::size_t body_bytes = ages_bytes + (view.has_velocity() ? 2 : 1) * elements_bytes;
  // First by elements: the bytes of a model that fits in no memory may not fit in std::size_t.
  refuse_if(body.size() / sizeof(T) < model.elements() || body.size() < body_bytes, errc::truncated);
  refuse_if(body.size() > body_bytes, errc::trailing_bytes);
  check_state_checksum(header, body, refuse_if);
  check_selector_numbers(header, name);
  view.sent_in = body.first(number_bytes);
  view.expected = body.subspan(number_bytes, ages_bytes - number_bytes);
  for (std::size_t l = 0; l < model.layers(); ++l)
    refuse_if(value_at<std::uint64_t>(view.sent_in, l) > header.step, errc::impossible_age);
  view.elements = body.subspan(ages_bytes, elements_bytes);
  view.velocity = body.subspan(ages_bytes + elements_bytes);
  return view;
}

// A residual that holds NaN or infinity must not become bytes that nothing loads.
template <element T>
void check_savable(const layout& model, std::span<const T> numbers, const char* what) {
  if (numbers.empty()) return;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const std::span<const T> layer = numbers.subspan(model.offset(l), model.sizes()[l]);
    if (is_finite_magnitude(largest_magnitude<T>(layer.size(), read_only<T>{layer.data()}))) continue;
    detail::raise(std::domain_error("save: the " + std::string(what) + " of layer '" + model[l].name +
                                    "' holds NaN or infinity"));
  }
}

}  // namespace lamina::inline LAMINA_ABI::detail

namespace lamina::inline LAMINA_ABI {

/// The memory of a worker after step `step`, as bytes: 64, 8 or 16 a fragment, and the residual and velocity in T.
///
/// \param fragments  what the worker decides on
/// \param memory     of its selector
/// \param residual   flat, fragments.elements() elements
/// \param velocity   as many, or none
/// \param step       the last that was committed, counted from 1; 0: none
/// \param expected   the values to plan the next step by, one a fragment, or none
/// \throws std::invalid_argument  other sizes
/// \throws std::domain_error      NaN or infinity, naming the fragment: nothing would load it
template <element T>
std::vector<std::byte> save_state(const layout& fragments, const selector::memory& memory,
                                  std::span<const T> residual, std::span<const T> velocity,
                                  std::uint64_t step, std::span<const double> expected = {}) {
  if (residual.size() != fragments.elements() ||
      (!velocity.empty() && velocity.size() != fragments.elements()) ||
      memory.sent_in.size() != fragments.layers() ||
      (!expected.empty() && expected.size() != fragments.layers())) {
    detail::raise(std::invalid_argument(
        "save_state: a residual of " + std::to_string(residual.size()) + " elements, a velocity of " +
        std::to_string(velocity.size()) + " and ages of " + std::to_string(memory.sent_in.size()) +
        " fragments, where the model has " + std::to_string(fragments.elements()) + " elements in " +
        std::to_string(fragments.layers()) + " fragments"));
  }
  detail::check_savable(fragments, residual, "residual");
  detail::check_savable(fragments, velocity, "velocity");
  return detail::write_state<T>(fragments, memory, residual, velocity, step, expected);
}

/// What such bytes hold.
template <element T>
struct saved_state {
  selector::memory memory;
  std::vector<T> residual;
  std::vector<T> velocity;  ///< empty without momentum
  std::uint64_t step = 0;
  std::vector<double> expected;  ///< may be empty
};

/// Reads them; `with_momentum` says whether they must hold velocity, or must not. Throws decode_error with the errc that says why they
/// are refused, and std::invalid_argument for numbers that are not finite.
template <element T>
[[nodiscard]] saved_state<T> read_state(std::span<const std::byte> bytes, const layout& fragments,
                                        bool with_momentum) {
  const detail::state_view state = detail::read_state<T>(bytes, fragments, with_momentum, "saved state");
  saved_state<T> saved{state.memory(), detail::values_of<T>(state.elements),
                       detail::values_of<T>(state.velocity), state.header.step,
                       detail::values_of<double>(state.expected)};
  for (const std::vector<T>* numbers : {&saved.residual, &saved.velocity}) {
    if (!detail::is_finite_magnitude(
            detail::largest_magnitude<T>(numbers->size(), detail::read_only<T>{numbers->data()})))
      detail::raise(std::invalid_argument("the saved residual holds NaN or infinity"));
  }
  return saved;
}

}  // namespace lamina::inline LAMINA_ABI
