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

#include "lamina/detail/abi.hpp"
#include "lamina/detail/checksum.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/error.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/selector.hpp"
#include "lamina/tensor.hpp"

/// The bytes of a worker's memory: little-endian, with the layout's fingerprint and a checksum. Bytes that are damaged, cut,
/// or of another model are refused.
namespace lamina::inline LAMINA_ABI::detail {

inline constexpr std::uint32_t state_magic = 0x534d4cf5;  // the bytes F5 'L' 'M' 'S'

inline constexpr std::uint8_t state_flag_checksum = 1;
inline constexpr std::uint8_t state_flag_velocity = 2;
// Not in version 1, which is of steps that are decided at their end. One of the two at most.
inline constexpr std::uint8_t state_flag_as_ready = 4;
inline constexpr std::uint8_t state_flag_ahead = 8;

struct state_header {
  std::uint32_t magic = state_magic;
  std::uint16_t version = 2;
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
                const layer_selector::memory& memory, std::uint64_t step) {
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
std::vector<std::byte> write_state(const layout& model, const layer_selector::memory& memory,
                                   std::span<const T> elements, std::span<const T> velocity,
                                   std::uint64_t step) {
  std::vector<std::byte> bytes(sizeof(state_header));
  append(bytes, std::span<const std::uint64_t>(memory.cleared_in));
  append(bytes, std::span<const std::uint64_t>(memory.waits_since));
  append(bytes, std::span<const double>(memory.planned));
  append(bytes, elements);
  append(bytes, velocity);

  state_header header;
  header.flags = static_cast<std::uint8_t>((velocity.empty() ? 0 : state_flag_velocity) |
                                           (memory.waits_since.empty() ? 0 : state_flag_as_ready) |
                                           (memory.planned.empty() ? 0 : state_flag_ahead));
  header.elements = model.elements();
  seal_state<T>(bytes, header, model, memory, step);
  return bytes;
}

// The parts of a state that was checked, in its bytes, where they need not be aligned.
struct state_view {
  state_header header;
  std::span<const std::byte> cleared_in;
  std::span<const std::byte> waits_since;  // empty unless as_ready
  std::span<const std::byte> planned;      // empty unless ahead
  std::span<const std::byte> elements;
  std::span<const std::byte> velocity;

  bool has_velocity() const noexcept { return (header.flags & state_flag_velocity) != 0; }
  decision_timing timing() const noexcept {
    if ((header.flags & state_flag_as_ready) != 0) return decision_timing::as_ready;
    return (header.flags & state_flag_ahead) != 0 ? decision_timing::ahead : decision_timing::at_end;
  }
  layer_selector::memory memory() const {
    return {header.threshold, header.allowance, values_of<std::uint64_t>(cleared_in),
            values_of<std::uint64_t>(waits_since), values_of<double>(planned)};
  }
};

// What must be known of a state beside its model: nothing where both will do.
struct expected_state {
  std::optional<bool> has_velocity = std::nullopt;
  std::optional<decision_timing> timing = std::nullopt;
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
  refuse_if(bytes.size() < sizeof header, state_errc::truncated);
  std::memcpy(&header, bytes.data(), sizeof header);
  refuse_if(header.magic != magic, state_errc::bad_magic);
  refuse_if(header.version == 0 || header.version > state_header{}.version, state_errc::unsupported_version);
  refuse_if(header.element_type != element_type, state_errc::wrong_element_type);
  refuse_if(header.fingerprint != model.fingerprint() || header.layers != model.layers(),
            state_errc::wrong_layout);
  return header;
}

template <class RefuseIf>
void check_state_checksum(const state_header& header, std::span<const std::byte> body,
                          const RefuseIf& refuse_if) {
  const bool has_checksum = (header.flags & state_flag_checksum) != 0;
  refuse_if(header.checksum != (has_checksum ? state_checksum(header, body) : 0),
            state_errc::checksum_mismatch);
}

inline void check_selector_numbers(const state_header& header, const std::string& name) {
  if (is_nan(header.threshold) || !is_finite(header.allowance))
    raise(std::invalid_argument(name + ": the threshold or the allowance is not a number"));
}

// `name` stands in the errors.
template <element T>
state_view read_state(std::span<const std::byte> bytes, const layout& model, const expected_state& expected,
                      const std::string& name) {
  const auto refuse_if = [&](bool bad, state_errc code) {
    if (bad) detail::raise(decode_error(make_error_code(code), name));
  };
  state_view view;
  state_header& header = view.header;
  header = read_state_header(bytes, state_magic, element_code<T>, model, refuse_if);
  constexpr unsigned timing_flags = state_flag_as_ready | state_flag_ahead;
  const unsigned known_flags =
      state_flag_checksum | state_flag_velocity | (header.version > 1 ? timing_flags : 0U);
  refuse_if((header.flags & ~known_flags) != 0 || (header.flags & timing_flags) == timing_flags,
            state_errc::nonzero_reserved);
  refuse_if(header.elements != model.elements(), state_errc::wrong_layout);
  refuse_if(view.has_velocity() != expected.has_velocity.value_or(view.has_velocity()),
            state_errc::other_momentum);
  refuse_if(view.timing() != expected.timing.value_or(view.timing()), state_errc::other_timing);

  const auto body = bytes.subspan(sizeof header);
  const std::size_t number_bytes = model.layers() * sizeof(std::uint64_t);  // one a layer
  const std::size_t numbers_bytes = (view.timing() == decision_timing::at_end ? 1 : 2) * number_bytes;
  const std::size_t elements_bytes = model.elements() * sizeof(T);
  const std::size_t body_bytes = numbers_bytes + (view.has_velocity() ? 2 : 1) * elements_bytes;
  // First by elements: the bytes of a model that fits in no memory may not fit in std::size_t.
  refuse_if(body.size() / sizeof(T) < model.elements() || body.size() < body_bytes, state_errc::truncated);
  refuse_if(body.size() > body_bytes, state_errc::trailing_bytes);
  check_state_checksum(header, body, refuse_if);
  check_selector_numbers(header, name);
  view.cleared_in = body.first(number_bytes);
  const auto behind = body.subspan(number_bytes, numbers_bytes - number_bytes);
  if (view.timing() == decision_timing::as_ready) view.waits_since = behind;
  if (view.timing() == decision_timing::ahead) view.planned = behind;
  for (const auto steps : {view.cleared_in, view.waits_since}) {
    for (std::size_t l = 0; l < steps.size() / sizeof(std::uint64_t); ++l) {
      refuse_if(value_at<std::uint64_t>(steps, l) > header.step, state_errc::impossible_age);
    }
  }
  view.elements = body.subspan(numbers_bytes, elements_bytes);
  view.velocity = body.subspan(numbers_bytes + elements_bytes);
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
