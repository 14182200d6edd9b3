// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/detail/rounding.hpp"
#include "lamina/half.hpp"
#include "lamina/payload.hpp"
#include "lamina/reduction.hpp"

/// What the elements of a block look like in each payload, and how a team reads a block and writes what it says.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// The scales of a block's elements, 64 of which share one.
using block_scales = std::uint8_t[block_elements / payload_block_elements];

/// Of elements whose largest magnitude is this.
template <class T>
LAMINA_HOST_DEVICE std::uint8_t scale_of(payload_type type, T largest) {
  return type == payload_type::int4 ? lamina::detail::block_scale<T, payload_type::int4>(largest)
                                    : lamina::detail::block_scale<T, payload_type::int8>(largest);
}

template <class T>
LAMINA_HOST_DEVICE T larger_magnitude(T largest, T element) {
  const T magnitude = element < 0 ? -element : element;
  return magnitude > largest ? magnitude : largest;
}

/// All of the team calls it, and may read the scales then, until it is called again. The block lies in the team's memory.
LAMINA_ANY_CALLER template <class T, class Team>
LAMINA_HOST_DEVICE void find_scales(const Team& team, payload_type type, const T* block, unsigned count,
                                    block_scales& scales) {
  constexpr auto group = static_cast<unsigned>(payload_block_elements);
  team.barrier();
  for (unsigned g = team.thread(); g * group < count; g += team.threads()) {
    T largest = 0;
    for (unsigned i = g * group; i < (g + 1) * group && i < count; ++i)
      largest = larger_magnitude(largest, block[i]);
    scales[g] = scale_of(type, largest);
  }
  team.barrier();
}

/// Four elements that are loaded and stored at once, 16 bytes at a time.
template <class T>
struct alignas(16) quad {
  T at[4];
};

/// A block in a team's memory, with the scales of its elements where its payload has any: it is read once, 16 bytes at a time,
/// wherever its payload lies.
template <class T>
struct staged_block {
  quad<T> four[block_elements / 4];
  T largest[block_elements / 4];  // magnitude of each four
  block_scales scale;

  LAMINA_HOST_DEVICE T operator[](unsigned i) const { return four[i / 4].at[i % 4]; }
};

/// All of the team calls it, and may read what is staged then, until it is called again.
LAMINA_ANY_CALLER template <class T, class Team>
LAMINA_HOST_DEVICE void stage(const Team& team, payload_type type, const T* block, unsigned count,
                              staged_block<T>& staged) {
  constexpr auto fours = static_cast<unsigned>(payload_block_elements / 4);
  team.barrier();
  for (unsigned q = team.thread(); 4 * q < count; q += team.threads()) {
    // Behind a layer there is room up to its 64th element.
    const quad<T> four = reinterpret_cast<const quad<T>*>(block)[q];
    T largest = 0;
    for (unsigned k = 0; k < 4; ++k) {
      if (4 * q + k < count) largest = larger_magnitude(largest, four.at[k]);
    }
    staged.four[q] = four;
    staged.largest[q] = largest;
  }
  team.barrier();
  if (!has_blocks(type)) return;
  for (unsigned g = team.thread(); 4 * g * fours < count; g += team.threads()) {
    T largest = 0;
    for (unsigned q = g * fours; q < (g + 1) * fours && 4 * q < count; ++q)
      largest = staged.largest[q] > largest ? staged.largest[q] : largest;
    staged.scale[g] = scale_of(type, largest);
  }
  team.barrier();
}

/// The integer that is written of an element, whose block has this scale.
template <class T>
LAMINA_HOST_DEVICE std::int8_t integer_of(T element, payload_type type, std::uint8_t scale_byte) {
  const T inverse = T(1) / lamina::detail::scale_value<T>(scale_byte);
  return type == payload_type::int4 ? lamina::detail::to_integer<T, payload_type::int4>(element, inverse)
                                    : lamina::detail::to_integer<T, payload_type::int8>(element, inverse);
}

/// What a payload of this type says of an element.
template <class T>
LAMINA_HOST_DEVICE T said_of(T element, payload_type type, std::uint8_t scale_byte) {
  switch (type) {
    case payload_type::float16:
      return to_float(lamina::detail::to_half<lamina::float16>(element));
    case payload_type::bfloat16:
      return to_float(lamina::detail::to_half<lamina::bfloat16>(element));
    case payload_type::int8:
    case payload_type::int4:
      return static_cast<T>(integer_of(element, type, scale_byte)) *
             lamina::detail::scale_value<T>(scale_byte);
    default:
      return element;
  }
}

/// What rounding took away of an element. NaN and infinity leave nothing over.
template <class T>
LAMINA_HOST_DEVICE T left_over(T element, payload_type type, std::uint8_t scale_byte) {
  const T said = said_of(element, type, scale_byte);
  return is_finite(said) ? element - said : T(0);
}

/// Sixteen bytes of a payload.
struct alignas(16) payload_word {
  std::uint32_t part[4];
};

/// Said to the compiler, which makes four stores of it where it is left the choice.
LAMINA_HOST_DEVICE inline void store_word(void* to, const payload_word& word) {
#if defined(__CUDA_ARCH__)
  __stcs(static_cast<uint4*>(to), make_uint4(word.part[0], word.part[1], word.part[2], word.part[3]));
#else
  *static_cast<payload_word*>(to) = word;
#endif
}

/// Of some multiple of 16 bytes.
template <class Value>
LAMINA_HOST_DEVICE void store_words(void* to, const Value& value) {
  constexpr unsigned words = sizeof value / sizeof(payload_word);
  struct in_words {
    payload_word at[words];
  };
  const auto stored = __builtin_bit_cast(in_words, value);
  for (unsigned k = 0; k < words; ++k) store_word(static_cast<payload_word*>(to) + k, stored.at[k]);
}

/// Writes `count` units of a payload from `to` on, unit(i) being what stands there: 16 bytes at a time wherever these lie
/// in one word of memory. What is shorter stands before the first and behind the last.
LAMINA_ANY_CALLER template <class Unit, class Team, class UnitAt>
LAMINA_HOST_DEVICE void write_units(const Team& team, Unit* to, unsigned count, const UnitAt& unit) {
  constexpr auto in_word = static_cast<unsigned>(sizeof(payload_word) / sizeof(Unit));
  const auto behind =
      static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(to) % sizeof(payload_word) / sizeof(Unit));
  const unsigned before = behind == 0 ? 0 : in_word - behind < count ? in_word - behind : count;
  const unsigned words = (count - before) / in_word;
  const unsigned first_after = before + words * in_word;
  for (unsigned w = team.thread(); w < words; w += team.threads()) {
    struct alignas(payload_word) {
      Unit at[in_word];
    } word;
    for (unsigned k = 0; k < in_word; ++k) word.at[k] = unit(before + w * in_word + k);
    store_word(to + before + w * in_word, __builtin_bit_cast(payload_word, word));
  }
  for (unsigned i = team.thread(); i < before; i += team.threads()) to[i] = unit(i);
  for (unsigned i = first_after + team.thread(); i < count; i += team.threads()) to[i] = unit(i);
}

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
