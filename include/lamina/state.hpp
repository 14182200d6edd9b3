// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/detail/checksum.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/error.hpp"
#include "lamina/residual.hpp"
#include "lamina/selector.hpp"

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
std::vector<Value> take(std::span<const std::byte>& bytes, std::size_t count) {
  std::vector<Value> values(count);
  if (count > 0) std::memcpy(values.data(), bytes.data(), count * sizeof(Value));
  bytes = bytes.subspan(count * sizeof(Value));
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

}  // namespace detail

/// The memory of a worker after step `step`, as bytes: 64, 8 a layer, and the residual and velocity in T. Cost: one copy.
/// gradient_compressor::save() calls it.
template <element T>
std::vector<std::byte> save_state(const residual_accumulator<T>& residual,
                                  const layer_selector::memory& memory, std::uint64_t step) {
  std::vector<std::byte> bytes(sizeof(detail::state_header));
  detail::append(bytes, std::span<const std::uint64_t>(memory.cleared_in));
  detail::append(bytes, residual.elements());
  detail::append(bytes, residual.velocity());

  detail::state_header header;
  header.element_type = detail::element_code<T>;
  header.flags = (detail::checksum::available ? detail::state_flag_checksum : 0) |
                 (residual.velocity().empty() ? 0 : detail::state_flag_velocity);
  header.fingerprint = residual.model().fingerprint();
  header.layers = residual.model().layers();
  header.elements = residual.model().elements();
  header.step = step;
  header.threshold = memory.threshold;
  header.allowance = memory.allowance;
  header.checksum = detail::state_checksum(header, std::span(bytes).subspan(sizeof header));
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

/// Puts the saved memory back and returns the step. Throws decode_error, and changes nothing, with the frame_errc that
/// says why.
template <element T>
std::uint64_t load_state(std::span<const std::byte> bytes, residual_accumulator<T>& residual,
                         layer_selector& selector) {
  const auto refuse_if = [](bool bad, frame_errc code) {
    if (bad) throw decode_error(make_error_code(code), "saved state");
  };
  detail::state_header header;
  refuse_if(bytes.size() < sizeof header, frame_errc::truncated);
  std::memcpy(&header, bytes.data(), sizeof header);
  refuse_if(header.magic != detail::state_magic, frame_errc::bad_magic);
  refuse_if(header.version != detail::state_header{}.version, frame_errc::unsupported_version);
  refuse_if(header.element_type != detail::element_code<T>, frame_errc::wrong_element_type);
  const layout& model = residual.model();
  const std::uint8_t velocity_flag = residual.velocity().empty() ? 0 : detail::state_flag_velocity;
  refuse_if((header.flags & ~(detail::state_flag_checksum | detail::state_flag_velocity)) != 0,
            frame_errc::nonzero_reserved);
  refuse_if(header.fingerprint != model.fingerprint() || header.layers != model.layers() ||
                header.elements != model.elements() ||
                (header.flags & detail::state_flag_velocity) != velocity_flag,
            frame_errc::wrong_layout);
  const bool has_checksum = (header.flags & detail::state_flag_checksum) != 0;
  refuse_if(has_checksum && !detail::checksum::available, frame_errc::checksum_unsupported);

  auto body = bytes.subspan(sizeof header);
  const std::size_t expected = model.layers() * sizeof(std::uint64_t) +
                               (residual.elements().size() + residual.velocity().size()) * sizeof(T);
  refuse_if(body.size() < expected, frame_errc::truncated);
  refuse_if(body.size() > expected, frame_errc::trailing_bytes);
  refuse_if(header.checksum != (has_checksum ? detail::state_checksum(header, body) : 0),
            frame_errc::checksum_mismatch);
  if (std::isnan(header.threshold) || !std::isfinite(header.allowance)) {
    throw std::invalid_argument("the saved threshold or allowance is not a number");
  }

  layer_selector::memory memory{header.threshold, header.allowance,
                                detail::take<std::uint64_t>(body, model.layers())};
  const std::vector<T> elements = detail::take<T>(body, residual.elements().size());
  const std::vector<T> velocity = detail::take<T>(body, residual.velocity().size());
  residual.restore(elements, velocity);
  selector.restore(std::move(memory));
  return header.step;
}

}  // namespace lamina
