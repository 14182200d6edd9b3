// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "lamina/collectives/sum.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"

/// Sums whose numbers travel in 16 bits. Each rank's numbers are rounded, its own too, added as float in rank order, and the sum is
/// rounded on its way back: with x_r of rank r and rounding [.], [(([x_0] + [x_1]) + [x_2]) + ...]. So a sum depends neither on who adds
/// nor on how layers are cut into buckets, chunks and slices, and is the same bits on all ranks. One rank sends nothing and rounds nothing.
///
/// What rounding takes away is lost, unless the caller keeps it. Finite numbers beyond the range of float16 become its largest; NaN and
/// infinity stay what they are.
namespace lamina::inline LAMINA_ABI::collectives {

/// Types as which numbers travel to be summed.
inline constexpr std::array all_sum_payloads = {payload_type::as_is, payload_type::float16,
                                                payload_type::bfloat16};

/// "as_is", "float16", "bfloat16"; "no payload of sums" for another.
[[nodiscard]] constexpr const char* name_of(payload_type which) noexcept {
  constexpr std::array names = {"as_is", "float16", "bfloat16"};
  const auto index = static_cast<std::size_t>(which);
  return index < names.size() ? names[index] : "no payload of sums";
}

/// The type of that name. Throws std::invalid_argument that lists the names.
[[nodiscard]] inline payload_type parse_sum_payload(std::string_view name) {
  std::string known;
  for (const payload_type each : all_sum_payloads) {
    if (name == name_of(each)) return each;
    known += (known.empty() ? "" : ", ") + std::string(name_of(each));
  }
  throw std::invalid_argument("sums have no payload '" + std::string(name) + "'; there are: " + known);
}

/// Bytes of a number on its way.
[[nodiscard]] constexpr std::size_t bytes_of_element(payload_type type) noexcept {
  return payload_bytes<float>(type, 1);
}

namespace detail {

/// Rounds `numbers` and leaves them in `to`, which has room for as many of them as they travel.
inline void narrow(payload_type type, std::span<const float> numbers, std::byte* to) noexcept {
  lamina::detail::encode_payload<float, lamina::detail::rest::is_lost>(type, numbers, to);
}
inline void widen(payload_type type, const std::byte* from, std::span<float> numbers) noexcept {
  lamina::detail::decode_payload<float>(type, from, numbers.size(), 0, numbers);
}

}  // namespace detail

/// own <- the sum over all ranks in rank order of numbers that were rounded, the own ones as well; the sum is not. `held` has own.size()
/// numbers of each other rank, by held_place, as they have travelled.
inline void fold_rounded_in_rank_order(payload_type type, std::size_t rank, std::size_t ranks,
                                       std::span<float> own, std::span<const std::byte> held) {
  constexpr std::size_t block_elements = 1024;  // stays in the first cache
  const std::size_t bytes = bytes_of_element(type);
  std::array<float, block_elements> total{};
  std::array<float, block_elements> next{};
  std::array<std::byte, sizeof(float) * block_elements> narrowed{};
  for (std::size_t begin = 0; begin < own.size(); begin += block_elements) {
    const std::span<float> here = own.subspan(begin, (std::min)(block_elements, own.size() - begin));
    detail::narrow(type, here, narrowed.data());
    for (std::size_t r = 0; r < ranks; ++r) {
      const std::byte* const from =
          r == rank ? narrowed.data() : held.data() + (held_place(rank, r) * own.size() + begin) * bytes;
      detail::widen(type, from, std::span(r == 0 ? total : next).first(here.size()));
      if (r > 0) add_to(std::span(total).first(here.size()), std::span(next).first(here.size()));
    }
    std::ranges::copy(std::span(total).first(here.size()), here.begin());
  }
}

}  // namespace lamina::inline LAMINA_ABI::collectives
