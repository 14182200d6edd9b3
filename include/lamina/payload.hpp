// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/detail/rows.hpp"
#include "lamina/options.hpp"

/// How the elements of a layer that is sent are written. What rounding takes away of gradients is not lost: it goes back into the residual,
/// exactly, so everything sent plus the residual is still the sum of the gradients. Of parameters it is lost. Read
/// detail/rows.hpp before, frame.hpp after.
namespace lamina::inline LAMINA_ABI {

/// Whether `type` writes integers in blocks that share a scale, so that a range of elements begins with a block.
constexpr bool has_blocks(payload_type type) noexcept {
  return type == payload_type::int8 || type == payload_type::int4 || type == payload_type::ternary;
}

/// Blocks of a layer, the last of which may be shorter: the bytes of its scales.
constexpr std::size_t payload_blocks(std::size_t elements) noexcept {
  return elements / payload_block_elements + (elements % payload_block_elements != 0);
}

/// Bytes of a layer of `elements` elements of T on the wire.
template <element T>
constexpr std::size_t payload_bytes(payload_type type, std::size_t elements) noexcept {
  switch (type) {
    case payload_type::float16:
    case payload_type::bfloat16:
      return elements * 2;
    case payload_type::int8:
      return payload_blocks(elements) + elements;
    case payload_type::int4:
      return payload_blocks(elements) + elements / 2 + elements % 2;
    case payload_type::ternary: {
      const std::size_t last = elements % payload_block_elements;
      return payload_blocks(elements) + elements / payload_block_elements * 13 + (last + 4) / 5;
    }
    default:
      return elements * sizeof(T);
  }
}

namespace detail {

/// Throws std::invalid_argument for what is none of the types.
inline void check_payload_type(payload_type type) {
  if (type <= payload_type::ternary) return;
  refuse("payload ", static_cast<int>(type), " is none of payload_type");
}

/// The same for one that no parameters are written in, since nobody would keep what it leaves out.
inline void check_parameters_type(payload_type type) {
  check_payload_type(type);
  if (type == payload_type::ternary) refuse("payload: parameters cannot be ternary");
}

/// As errors name a type with blocks.
inline std::string name_of(payload_type type) {
  return type == payload_type::ternary ? "ternary" : type == payload_type::int4 ? "int4" : "int8";
}

// The scale is 2^(byte - 127), as the E8M0 scale of the OCP microscaling formats: products with it are exact, and so is what remains.
inline constexpr int scale_bias = 127;
inline constexpr int smallest_scale = -120;  // products stay clear of denormals
inline constexpr int largest_scale = 120;

/// The largest integer of the type, which is symmetric: the smallest is its negative.
constexpr int largest_integer(payload_type type) noexcept {
  return type == payload_type::int4 ? 7 : 127;
}

template <element T>
constexpr T scale_value(std::uint8_t byte) noexcept {
  return static_cast<T>(std::bit_cast<float>(static_cast<std::uint32_t>(byte) << 23U));
}

// The scale of a block whose largest magnitude is given: the smallest with which it fits into the type's integers.
template <element T, payload_type Type>
constexpr std::uint8_t block_scale(T largest) noexcept {
  constexpr int mantissa_bits = std::numeric_limits<T>::digits - 1;
  constexpr int exponent_bias = std::numeric_limits<T>::max_exponent - 1;
  constexpr int integer_bits = Type == payload_type::int4 ? 3 : 7;
  // largest < 2^exponent, hence largest / 2^(exponent - integer_bits) < 2^integer_bits. For 0 any would do: 0. Denormals end
  // at the smallest.
  const int exponent = largest == 0 ? 0
                                    : static_cast<int>(std::bit_cast<bits_of<T>>(largest) >> mantissa_bits) -
                                          exponent_bias + 1;
  // By values: std::clamp takes references, which device code has not to constants of a namespace.
  const int scale_exponent = std::clamp(exponent - integer_bits, int{smallest_scale}, int{largest_scale});
  const auto scale = static_cast<std::uint8_t>(scale_exponent + scale_bias);
  const bool is_too_small = largest > T(largest_integer(Type)) * scale_value<T>(scale);
  return static_cast<std::uint8_t>(scale + (is_too_small && scale_exponent != largest_scale));
}

/// What becomes of what a payload does not say of a number.
enum class rest {
  is_kept,  ///< gradients: in the residual
  is_lost,  ///< parameters
};

// From here on a number has no digits as fine as those of the payload's largest number, whose multiple of `finest` it is:
// what remains after sending that could not be written down. Such a number is not sent at all.
template <element T>
constexpr T unsendable_from(double finest) noexcept {
  const double limit = finest * (sizeof(T) == 4 ? 0x1p24 : 0x1p53);
  return limit < static_cast<double>((std::numeric_limits<T>::max)()) ? static_cast<T>(limit)
                                                                      : std::numeric_limits<T>::infinity();
}

/// The nearest integer within the type's, ties to even; 0 of what cannot be sent. Like to_half without a branch and with magnitudes
/// as integers: compilers vectorise a loop over it, and -ffast-math changes nothing.
LAMINA_ANY_CALLER template <element T, payload_type Type, rest Rest = rest::is_kept>
LAMINA_HOST_DEVICE constexpr std::int8_t to_integer(T x, T inverse_scale) noexcept {
  constexpr bits_of<T> unsendable = std::bit_cast<bits_of<T>>(
      Rest == rest::is_kept ? unsendable_from<T>(0x1p120) : std::numeric_limits<T>::infinity());
  constexpr bits_of<T> most = std::bit_cast<bits_of<T>>(T(largest_integer(Type)));
  // Adding this power of two leaves the nearest integer in the mantissa.
  constexpr T shift = sizeof(T) == 4 ? T(0x1p23) : T(0x1p52);
  const bits_of<T> magnitude = magnitude_pattern(x);
  const bits_of<T> scaled = std::bit_cast<bits_of<T>>(std::bit_cast<T>(magnitude) * inverse_scale);
  const T within = std::bit_cast<T>(smaller<T>(scaled, most));
  const bits_of<T> integer = (std::bit_cast<bits_of<T>>(within + shift) - std::bit_cast<bits_of<T>>(shift)) &
                             mask_below<T>(magnitude, unsendable);
  const bits_of<T> sign = std::bit_cast<bits_of<T>>(x) >> (8 * sizeof(T) - 1);
  return static_cast<std::int8_t>((integer ^ sign) - sign);
}

/// NaN and infinity stay what they are.
template <half_element Half, element T, rest Rest = rest::is_kept>
constexpr Half to_half(T x) noexcept {
  constexpr bool is_float16 = std::same_as<Half, lamina::float16>;
  constexpr bits_of<T> infinity = std::bit_cast<bits_of<T>>(std::numeric_limits<T>::infinity());
  constexpr bits_of<T> unsendable =
      Rest == rest::is_lost ? infinity
                            : std::bit_cast<bits_of<T>>(unsendable_from<T>(is_float16 ? 0x1p5 : 0x1p120));
  constexpr std::int32_t half_infinity = is_float16 ? 0x7c00 : 0x7f80;
  // A double beyond it would become infinity on the way.
  constexpr bits_of<T> largest = std::bit_cast<bits_of<T>>(T((std::numeric_limits<float>::max)()));

  const bits_of<T> magnitude = magnitude_pattern(x);
  const bits_of<T> sendable = magnitude & mask_below<T>(magnitude, unsendable);
  const auto narrowed = static_cast<float>(std::bit_cast<T>(smaller<T>(sendable, largest)));
  const std::int32_t number = round_magnitude<Half>(std::bit_cast<std::int32_t>(narrowed));
  const std::int32_t sign =
      static_cast<std::int32_t>(std::bit_cast<bits_of<T>>(x) >> (8 * sizeof(T) - 16)) & 0x8000;
  const auto is_finite = static_cast<std::int32_t>(mask_below<T>(magnitude, infinity));
  const auto is_number = static_cast<std::int32_t>(mask_below<T>(magnitude, infinity + 1));
  const std::int32_t not_finite = half_infinity | (0x7fff & ~is_number);
  return {static_cast<std::uint16_t>((sign & is_number) | (number & is_finite) | (not_finite & ~is_finite))};
}

/// A row of numbers that are all within the type's range, so that nothing is cut and nothing is left out.
template <half_element Half, element T>
LAMINA_ALWAYS_INLINE void narrow_row(const T* row,
                                     std::array<Half, payload_block_elements>& halves) noexcept {
#if defined(__F16C__)
  if constexpr (std::same_as<Half, lamina::float16> && sizeof(T) == 4) {
    for (std::size_t i = 0; i < halves.size(); i += 8) {
      const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(row + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(halves.data() + i), eight);
    }
    return;
  }
#endif
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(row[i]));
    if constexpr (std::same_as<Half, lamina::bfloat16>) {
      halves[i] = {static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U)};
    } else {
      const std::int32_t magnitude = round_in_range(static_cast<std::int32_t>(bits & 0x7fffffffU));
      halves[i] = {
          static_cast<std::uint16_t>(((bits >> 16U) & 0x8000U) | static_cast<std::uint32_t>(magnitude))};
    }
  }
}

template <half_element Half, element T, rest Rest>
void encode_half(std::span<const T> from, std::byte* to) noexcept {
  constexpr T most = std::same_as<Half, lamina::float16> ? T(65504) : T(0x1.fep127);
  for_each_row(from, [&](const T* row, std::size_t count, std::size_t begin) LAMINA_INLINED {
    std::array<Half, payload_block_elements> halves;
    if (is_row_within(row, most)) [[likely]] {
      narrow_row(row, halves);
    } else {
      for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = to_half<Half, T, Rest>(row[i]);
    }
    std::memcpy(to + begin * sizeof(Half), halves.data(), count * sizeof(Half));
  });
}

template <half_element Half, element T>
void decode_half(const std::byte* from, std::span<T> to) noexcept {
  for_each_row(to, [&](T* row, std::size_t count, std::size_t begin) LAMINA_INLINED {
    std::array<Half, payload_block_elements> halves = {};
    std::memcpy(halves.data(), from + begin * sizeof(Half), count * sizeof(Half));
    widen_all<payload_block_elements>(halves.data(), row);
  });
}

// The scale and the integers of a block.
template <payload_type Type, element T, rest Rest>
LAMINA_ALWAYS_INLINE std::uint8_t round_block(
    const T* block, std::array<std::int8_t, payload_block_elements>& integers) noexcept {
  constexpr T most = T(largest_integer(Type)) * T(0x1p120);
  const bits_of<T> largest = largest_pattern<true>(block);
  if (largest <= std::bit_cast<bits_of<T>>(most)) [[likely]] {
    // None is cut or left out. Adding 1.5 times this power of two leaves the nearest integer in the mantissa.
    constexpr T shift = sizeof(T) == 4 ? T(0x1.8p23) : T(0x1.8p52);
    const std::uint8_t scale = block_scale<T, Type>(std::bit_cast<T>(largest));
    const T inverse = T(1) / scale_value<T>(scale);
    for (std::size_t i = 0; i < integers.size(); ++i)
      integers[i] = static_cast<std::int8_t>(std::bit_cast<bits_of<T>>(block[i] * inverse + shift) -
                                             std::bit_cast<bits_of<T>>(shift));
    return scale;
  }
  const std::uint8_t scale = block_scale<T, Type>(std::bit_cast<T>(largest_pattern<false>(block)));
  const T inverse = T(1) / scale_value<T>(scale);
  for (std::size_t i = 0; i < integers.size(); ++i)
    integers[i] = to_integer<T, Type, Rest>(block[i], inverse);
  return scale;
}

// The scales of all blocks come first, then the integers; of int4 two a byte, the first in the lower half.
template <payload_type Type, element T, rest Rest>
void encode_integers(std::span<const T> from, std::byte* to) noexcept {
  std::byte* integers_to = to + payload_blocks(from.size());
  for_each_row(from, [&](const T* block, std::size_t count, std::size_t) LAMINA_INLINED {
    std::array<std::int8_t, payload_block_elements> integers;
    *to++ = std::byte{round_block<Type, T, Rest>(block, integers)};
    const std::size_t bytes = payload_bytes<T>(Type, count) - 1;
    if constexpr (Type == payload_type::int4) {
      std::array<std::uint8_t, payload_block_elements / 2> pairs;
      for (std::size_t i = 0; i < payload_block_elements / 2; ++i)
        pairs[i] = static_cast<std::uint8_t>((integers[2 * i] & 0x0f) | (integers[2 * i + 1] << 4));
      std::memcpy(integers_to, pairs.data(), bytes);
    } else {
      std::memcpy(integers_to, integers.data(), bytes);
    }
    integers_to += bytes;
  });
}

// `begin` is a multiple of payload_block_elements.
template <payload_type Type, element T>
void decode_integers(const std::byte* layer, std::size_t layer_elements, std::size_t begin,
                     std::span<T> to) noexcept {
  const std::byte* scales = layer + begin / payload_block_elements;
  const std::byte* integers =
      layer + payload_blocks(layer_elements) + (Type == payload_type::int4 ? begin / 2 : begin);
  for_each_row(to, [&](T* row, std::size_t count, std::size_t) LAMINA_INLINED {
    const T scale = scale_value<T>(std::to_integer<std::uint8_t>(*scales++));
    std::array<std::int8_t, payload_block_elements> each = {};
    const std::size_t bytes = payload_bytes<T>(Type, count) - 1;
    if constexpr (Type == payload_type::int4) {
      std::array<std::uint8_t, payload_block_elements / 2> pairs = {};
      std::memcpy(pairs.data(), integers, bytes);
      for (std::size_t i = 0; i < payload_block_elements / 2; ++i) {
        each[2 * i] = static_cast<std::int8_t>(((pairs[i] & 0x0f) ^ 8) - 8);
        each[2 * i + 1] = static_cast<std::int8_t>(((pairs[i] >> 4) ^ 8) - 8);
      }
    } else {
      std::memcpy(each.data(), integers, bytes);
    }
    for (std::size_t i = 0; i < each.size(); ++i) row[i] = static_cast<T>(each[i]) * scale;
    integers += bytes;
  });
}

/// Whether the bytes of a layer that is sent are five trits each where the type has trits: they go from -121 to 121.
inline bool are_trits(payload_type type, std::span<const std::byte> layer, std::size_t elements) noexcept {
  return type != payload_type::ternary ||
         std::ranges::all_of(layer.subspan(payload_blocks(elements)), [](std::byte each) {
           return std::abs(static_cast<int>(static_cast<std::int8_t>(each))) <= 121;
         });
}

// The bytes of a block's trits, five to each.
constexpr std::size_t ternary_stride(std::size_t count) noexcept {
  return (count + 4) / 5;
}

// The scale of a block: the power of two that is nearest, in the logarithm, to the sum of squares over the sum of magnitudes. That is the
// level of least square error for a Laplace distribution, and to 3 % for a normal one (Max, Quantizing for minimum distortion, 1960); of
// zeros and one magnitude it is that magnitude, so that what was read is written as it was.
template <element T>
LAMINA_ALWAYS_INLINE std::uint8_t ternary_scale(const T* block) noexcept {
  constexpr std::size_t sums = 8;
  std::array<double, sums> magnitudes = {};
  std::array<double, sums> squares = {};
  for (std::size_t i = 0; i < payload_block_elements; i += sums) {
    for (std::size_t k = 0; k < sums; ++k) {
      const double magnitude = std::bit_cast<T>(magnitude_pattern(block[i + k]));
      magnitudes[k] += magnitude;
      squares[k] += magnitude * magnitude;
    }
  }
  for (std::size_t half_of = sums / 2; half_of > 0; half_of /= 2) {
    for (std::size_t k = 0; k < half_of; ++k) {
      magnitudes[k] += magnitudes[k + half_of];
      squares[k] += squares[k + half_of];
    }
  }
  if (magnitudes[0] == 0) return static_cast<std::uint8_t>(smallest_scale + scale_bias);
  const double level =
      squares[0] / magnitudes[0] * 0x1.6a09e667f3bcdp0;  // times the root of 2, to be rounded down
  const int exponent = static_cast<int>(std::bit_cast<std::int64_t>(level) >> 52) - 1023;
  return static_cast<std::uint8_t>(std::clamp(exponent, int{smallest_scale}, int{largest_scale}) +
                                   scale_bias);
}

// The scales of all blocks come first, then the trits, -1, 0 or 1 times the scale. A byte is the sum of 3^k times its trit k, and trit k of
// byte j of a block is that of its element k * stride + j, so that registers hold neighbours. Of what is not finite, or so large that what
// remains of it could not be written down, 0 is sent.
template <element T>
void encode_ternary(std::span<const T> from, std::byte* to) noexcept {
  constexpr T most = sizeof(T) == 4 ? (std::numeric_limits<T>::max)() : T(0x1p140);
  std::byte* packed_to = to + payload_blocks(from.size());
  for_each_row(from, [&](const T* block, std::size_t count, std::size_t) LAMINA_INLINED {
    std::array<T, payload_block_elements> sendable;
    if (!is_row_within(block, most)) {
      for (std::size_t i = 0; i < sendable.size(); ++i)
        sendable[i] = magnitude_pattern(block[i]) <= std::bit_cast<bits_of<T>>(most) ? block[i] : T(0);
      block = sendable.data();
    }
    const std::uint8_t scale = ternary_scale(block);
    *to++ = std::byte{scale};
    const T least = scale_value<T>(scale) / 2;
    std::array<std::int8_t, 80> trits = {};
    for (std::size_t i = 0; i < payload_block_elements; ++i)
      trits[i] = static_cast<std::int8_t>((block[i] >= least) - (block[i] <= -least));
    std::array<std::int8_t, 16> packed;
    const std::size_t stride = ternary_stride(count);
    const auto pack = [&](std::size_t apart) LAMINA_INLINED {
      for (std::size_t j = 0; j < packed.size(); ++j) {
        packed[j] = static_cast<std::int8_t>(trits[j] + 3 * trits[j + apart] + 9 * trits[j + 2 * apart] +
                                             27 * trits[j + 3 * apart] + 81 * trits[j + 4 * apart]);
      }
    };
    if (stride == 13) {
      pack(13);  // of a known length
    } else {
      pack(stride);
    }
    std::memcpy(packed_to, packed.data(), stride);
    packed_to += stride;
  });
}

// `begin` is a multiple of payload_block_elements.
template <element T>
void decode_ternary(const std::byte* layer, std::size_t layer_elements, std::size_t begin,
                    std::span<T> to) noexcept {
  const std::byte* scales = layer + begin / payload_block_elements;
  const std::byte* packed_from = layer + payload_blocks(layer_elements) + begin / payload_block_elements * 13;
  for_each_row(to, [&](T* row, std::size_t, std::size_t first) LAMINA_INLINED {
    const T scale = scale_value<T>(std::to_integer<std::uint8_t>(*scales++));
    // Of the block, of which the row may be the beginning.
    const std::size_t stride =
        ternary_stride((std::min)(layer_elements - begin - first, payload_block_elements));
    std::array<std::int8_t, 80> trits = {};
    const auto unpack = [&](std::size_t apart) LAMINA_INLINED {
      std::array<std::uint8_t, 16> packed = {};
      std::memcpy(packed.data(), packed_from, apart);
      for (std::uint8_t& each : packed) each = static_cast<std::uint8_t>(each + 121U);
      for (std::size_t k = 0; k < 5; ++k) {
        for (std::size_t j = 0; j < packed.size(); ++j) {
          const auto third = static_cast<std::uint8_t>(packed[j] * 171U >> 9U);
          trits[k * apart + j] = static_cast<std::int8_t>(packed[j] - 3 * third - 1);
          packed[j] = third;
        }
      }
    };
    if (stride == 13) {
      unpack(13);
    } else {
      unpack(stride);
    }
    for (std::size_t i = 0; i < payload_block_elements; ++i) row[i] = static_cast<T>(trits[i]) * scale;
    packed_from += stride;
  });
}

/// Writes `from` in a type other than as_is; `to` has payload_bytes() bytes.
template <element T, rest Rest = rest::is_kept>
void encode_payload(payload_type type, std::span<const T> from, std::byte* to) noexcept {
  switch (type) {
    case payload_type::float16:
      return encode_half<lamina::float16, T, Rest>(from, to);
    case payload_type::bfloat16:
      return encode_half<lamina::bfloat16, T, Rest>(from, to);
    case payload_type::int4:
      return encode_integers<payload_type::int4, T, Rest>(from, to);
    case payload_type::ternary:
      return encode_ternary(from, to);
    default:
      return encode_integers<payload_type::int8, T, Rest>(from, to);
  }
}

/// Elements [begin, begin + to.size()) of a layer of `layer_elements`, whatever the type; where it has blocks, `begin` is a multiple
/// of payload_block_elements.
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
      return decode_integers<payload_type::int8>(layer, layer_elements, begin, to);
    case payload_type::int4:
      return decode_integers<payload_type::int4>(layer, layer_elements, begin, to);
    case payload_type::ternary:
      return decode_ternary(layer, layer_elements, begin, to);
  }
}

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI
