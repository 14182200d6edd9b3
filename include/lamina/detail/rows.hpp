// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/tensor.hpp"

/// Rows of 64 elements, whose loops have a known length, and the bits of magnitudes: what payloads are written with. Read tensor.hpp
/// before, payload.hpp after.
namespace lamina::inline LAMINA_ABI {

/// Elements that share one scale in payload_type::int8, int4 and ternary.
inline constexpr std::size_t payload_block_elements = 64;

namespace detail {

/// The bits of a magnitude, signed, since SSE2 compares no others; they compare as magnitudes do, NaN the largest.
template <element T>
constexpr bits_of<T> magnitude_pattern(T x) noexcept {
  return std::bit_cast<bits_of<T>>(x) & (std::numeric_limits<bits_of<T>>::max)();
}

/// All ones where a magnitude is below a limit, else 0. By a shift: compilers make branches of a comparison that is used twice.
template <element T>
constexpr bits_of<T> mask_below(bits_of<T> magnitude, bits_of<T> limit) noexcept {
  return (magnitude - limit) >> (8 * sizeof(T) - 1);
}

template <element T>
constexpr bits_of<T> smaller(bits_of<T> magnitude, bits_of<T> limit) noexcept {
  return limit + ((magnitude - limit) & mask_below<T>(magnitude, limit));
}

/// Calls body(row, count, begin) for each row of elements to read, or to write, of which there are always as many: the last row lies
/// elsewhere, filled up with zeros, and `count` says how many of it there are. So each loop over a row has a known length, and g++ -O2
/// vectorises it.
template <class T, class Body>
LAMINA_ALWAYS_INLINE void for_each_row(std::span<T> elements, const Body& body) {
  std::size_t begin = 0;
  for (; elements.size() - begin >= payload_block_elements; begin += payload_block_elements)
    body(elements.data() + begin, payload_block_elements, begin);
  if (begin == elements.size()) return;
  const std::size_t count = elements.size() - begin;
  std::array<std::remove_const_t<T>, payload_block_elements> last;
  if constexpr (std::is_const_v<T>) {
    std::fill(std::copy_n(elements.data() + begin, count, last.begin()), last.end(), T(0));
    body(last.data(), count, begin);
  } else {
    body(last.data(), count, begin);
    std::copy_n(last.begin(), count, elements.data() + begin);
  }
}

/// Whether no magnitude of a row is beyond `most`, NaN being beyond all.
template <element T>
LAMINA_ALWAYS_INLINE bool is_row_within(const T* row, T most) noexcept {
  bits_of<T> signs = 0;  // of which one is set where a magnitude is beyond
  for (std::size_t i = 0; i < payload_block_elements; ++i)
    signs |= std::bit_cast<bits_of<T>>(most) - magnitude_pattern(row[i]);
  return signs >= 0;
}

// The pattern of a block's largest magnitude, NaN passed over if it is not to count.
template <bool CountsNan, element T>
LAMINA_ALWAYS_INLINE bits_of<T> largest_pattern(const T* block) noexcept {
  constexpr bits_of<T> infinity = std::bit_cast<bits_of<T>>(std::numeric_limits<T>::infinity());
  bits_of<T> largest = 0;
  for (std::size_t i = 0; i < payload_block_elements; ++i) {
    bits_of<T> magnitude = magnitude_pattern(block[i]);
    if (!CountsNan) magnitude &= mask_below<T>(magnitude, infinity + 1);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI
