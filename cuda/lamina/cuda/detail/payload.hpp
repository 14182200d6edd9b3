// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/elements.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/detail/rounding.hpp"
#include "lamina/half.hpp"
#include "lamina/payload.hpp"
#include "lamina/reduction.hpp"

/// What the elements of a block look like in each payload, and what of it stays in the residual.
namespace lamina::inline LAMINA_ABI::cuda::detail {

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

/// The scale of a row of 64 elements, of which each thread of a group has some and zeros for what is beyond the last. All of the group
/// calls it and gets it.
LAMINA_ANY_CALLER template <class Group, class T, unsigned Each>
LAMINA_HOST_DEVICE std::uint8_t scale_of_row(const Group& group, payload_type type,
                                             const unit<T, Each>& own) {
  static_assert(payload_block_elements == lanes);
  T largest = 0;
  for (unsigned k = 0; k < Each; ++k) largest = larger_magnitude(largest, own.at[k]);
  for (unsigned distance = Group::threads / 2; distance > 0; distance /= 2)
    largest = larger_magnitude(largest, group.across(largest, distance));
  return scale_of(type, largest);
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

/// Takes off a block of the residual what its payload said, by all of a group; behind the last element of a row there are zeros.
LAMINA_ANY_CALLER template <class Group, class T>
LAMINA_HOST_DEVICE LAMINA_CALLED void subtract_sent(const Group& group, payload_type type, T* block,
                                                    unsigned count) {
  constexpr auto row = static_cast<unsigned>(lanes);
  constexpr unsigned each = row / Group::threads;
  for (unsigned first = group.thread() * each; first < (count + row - 1) / row * row; first += row) {
    auto own = load<T, each>(block + first);
    const std::uint8_t scale = has_blocks(type) ? scale_of_row(group, type, own) : std::uint8_t{0};
    for (unsigned k = 0; k < each; ++k) own.at[k] = left_over(own.at[k], type, scale);
    store(block + first, own);
  }
}

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
