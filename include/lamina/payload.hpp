// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/half.hpp"
#include "lamina/options.hpp"
#include "lamina/tensor.hpp"

/// How the elements of a layer that is sent are written. What rounding takes away of gradients is not lost: it goes back into
/// the residual, exactly, so everything sent plus the residual is still the sum of the gradients. Of parameters it is lost.
namespace lamina::inline LAMINA_ABI {

/// Elements that share one scale in payload_type::int8.
inline constexpr std::size_t int8_block_elements = 64;

/// Bytes of a layer of `elements` elements of T on the wire.
template <element T>
constexpr std::size_t payload_bytes(payload_type type, std::size_t elements) noexcept {
  switch (type) {
    case payload_type::float16:
    case payload_type::bfloat16:
      return elements * 2;
    case payload_type::int8:
      return elements + elements / int8_block_elements + (elements % int8_block_elements != 0);
    default:
      return elements * sizeof(T);
  }
}

namespace detail {

// The scale is 2^(byte - 127), as the E8M0 scale of the OCP microscaling formats: products with it are exact, and so is
// what is left over.
inline constexpr int scale_bias = 127;
inline constexpr int smallest_scale = -120;  // products stay clear of denormals
inline constexpr int largest_scale = 120;

template <element T>
constexpr T scale_value(std::uint8_t byte) noexcept {
  return static_cast<T>(std::bit_cast<float>(static_cast<std::uint32_t>(byte) << 23U));
}

// The scale of a block whose largest magnitude is given: the smallest with which it fits into 127 integers.
template <element T>
constexpr std::uint8_t int8_scale(T largest) noexcept {
  using bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  constexpr int mantissa_bits = std::numeric_limits<T>::digits - 1;
  constexpr int exponent_bias = std::numeric_limits<T>::max_exponent - 1;
  // largest < 2^exponent, hence largest / 2^(exponent - 7) < 128. For 0 any would do: 0. Denormals end at the smallest.
  const int exponent =
      largest == 0 ? 0 : static_cast<int>(std::bit_cast<bits>(largest) >> mantissa_bits) - exponent_bias + 1;
  const auto scale =
      static_cast<std::uint8_t>(std::clamp(exponent - 7, smallest_scale, largest_scale) + scale_bias);
  const bool is_largest = scale == largest_scale + scale_bias;
  return !is_largest && largest > T(127) * scale_value<T>(scale) ? static_cast<std::uint8_t>(scale + 1)
                                                                 : scale;
}

template <element T>
constexpr std::uint8_t int8_scale(std::span<const T> block) noexcept {
  T largest = 0;
  for (const T x : block) largest = std::max(largest, x < 0 ? -x : x);
  return int8_scale(largest);
}

/// What becomes of what a payload does not say of a number.
enum class rest {
  is_kept,  ///< gradients: in the residual
  is_lost,  ///< parameters
};

// From here on a number has no digits as fine as those of the payload's largest number, whose multiple of `finest` it is:
// what is left over after sending that could not be written down. Such a number is not sent at all.
template <element T>
constexpr T unsendable_from(double finest) noexcept {
  const double limit = finest * (sizeof(T) == 4 ? 0x1p24 : 0x1p53);
  return limit < static_cast<double>(std::numeric_limits<T>::max()) ? static_cast<T>(limit)
                                                                    : std::numeric_limits<T>::infinity();
}

LAMINA_ANY_CALLER template <element T, rest Rest = rest::is_kept>
LAMINA_HOST_DEVICE std::int8_t to_int8(T x, T inverse_scale) noexcept {
  constexpr T unsendable = unsendable_from<T>(0x1p120);
  if (Rest == rest::is_kept && !((x < 0 ? -x : x) < unsendable)) return 0;  // NaN, too
  return static_cast<std::int8_t>(std::clamp(std::nearbyint(x * inverse_scale), T(-127), T(127)));
}

/// NaN and infinity stay what they are.
template <half_element Half, element T, rest Rest = rest::is_kept>
constexpr Half to_half(T x) noexcept {
  // By bits, for -ffast-math.
  using bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  constexpr bits sign = static_cast<bits>(bits{1} << (8 * sizeof(T) - 1));
  const bits pattern = std::bit_cast<bits>(x);
  const bits magnitude = static_cast<bits>(pattern & static_cast<bits>(~sign));
  constexpr bits infinity = std::bit_cast<bits>(std::numeric_limits<T>::infinity());
  constexpr std::uint16_t half_infinity = std::same_as<Half, lamina::float16> ? 0x7c00 : 0x7f80;
  const std::uint16_t not_finite =
      magnitude > infinity ? std::uint16_t{0x7fff}
                           : static_cast<std::uint16_t>(half_infinity | (pattern != magnitude ? 0x8000 : 0));

  constexpr T unsendable = unsendable_from<T>(std::same_as<Half, lamina::float16> ? 0x1p5 : 0x1p120);
  constexpr T largest =
      std::numeric_limits<float>::max();  // a double beyond it would become infinity on the way
  const bool is_said = Rest == rest::is_lost || (x < 0 ? -x : x) < unsendable;
  const T sendable = magnitude < infinity && is_said ? std::clamp(x, -largest, largest) : T(0);
  const Half rounded = saturating_round<Half>(static_cast<float>(sendable));
  return {magnitude < infinity ? rounded.bits : not_finite};
}

template <half_element Half, element T, rest Rest>
void encode_half(std::span<const T> from, std::byte* to) noexcept {
  for (const T x : from) {
    const Half half = to_half<Half, T, Rest>(x);
    std::memcpy(to, &half, sizeof half);
    to += sizeof half;
  }
}

template <half_element Half, element T>
void decode_half(const std::byte* from, std::span<T> to) noexcept {
  for (T& x : to) {
    Half half;
    std::memcpy(&half, from, sizeof half);
    x = to_float(half);
    from += sizeof half;
  }
}

// The scales of all blocks come first, then the integers.
template <element T, rest Rest>
void encode_int8(std::span<const T> from, std::byte* to) noexcept {
  std::byte* integers = to + (payload_bytes<T>(payload_type::int8, from.size()) - from.size());
  for (std::size_t begin = 0; begin < from.size(); begin += int8_block_elements) {
    const auto block = from.subspan(begin, std::min(int8_block_elements, from.size() - begin));
    const std::uint8_t scale = int8_scale(block);
    *to++ = std::byte{scale};
    const T inverse = T(1) / scale_value<T>(scale);
    for (const T x : block) *integers++ = std::bit_cast<std::byte>(to_int8<T, Rest>(x, inverse));
  }
}

// `begin` is a multiple of int8_block_elements.
template <element T>
void decode_int8(const std::byte* layer, std::size_t layer_elements, std::size_t begin,
                 std::span<T> to) noexcept {
  const std::byte* scales = layer + begin / int8_block_elements;
  const std::byte* integers =
      layer + (payload_bytes<T>(payload_type::int8, layer_elements) - layer_elements) + begin;
  while (!to.empty()) {
    const T scale = scale_value<T>(std::to_integer<std::uint8_t>(*scales++));
    const auto block = to.first(std::min(int8_block_elements, to.size()));
    for (T& x : block) x = static_cast<T>(std::bit_cast<std::int8_t>(*integers++)) * scale;
    to = to.subspan(block.size());
  }
}

/// Writes `from` in a type other than as_is; `to` has payload_bytes() bytes.
template <element T, rest Rest = rest::is_kept>
void encode_payload(payload_type type, std::span<const T> from, std::byte* to) noexcept {
  switch (type) {
    case payload_type::float16:
      return encode_half<lamina::float16, T, Rest>(from, to);
    case payload_type::bfloat16:
      return encode_half<lamina::bfloat16, T, Rest>(from, to);
    default:
      return encode_int8<T, Rest>(from, to);
  }
}

/// Elements [begin, begin + to.size()) of a layer of `layer_elements`, whatever the type; of int8, `begin` is a multiple of
/// int8_block_elements.
template <element T>
void decode_payload(payload_type type, const std::byte* layer, std::size_t layer_elements, std::size_t begin,
                    std::span<T> to) noexcept {
  switch (type) {
    case payload_type::as_is:
      if (!to.empty()) std::memcpy(to.data(), layer + begin * sizeof(T), to.size_bytes());
      return;
    case payload_type::float16:
      return decode_half<lamina::float16>(layer + begin * 2, to);
    case payload_type::bfloat16:
      return decode_half<lamina::bfloat16>(layer + begin * 2, to);
    case payload_type::int8:
      return decode_int8(layer, layer_elements, begin, to);
  }
}

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI
