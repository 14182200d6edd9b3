// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "lamina/collectives/schedule.hpp"
#include "lamina/detail/loops.hpp"
#include "lamina/payload.hpp"

/// \file
/// The order in which numbers are added, and how they travel: a sum of floats is bitwise identical on all ranks and in every run. Read it
/// after schedule.hpp.
///
/// Which rank adds two numbers does not matter, since the addition of two is commutative; which two are added does. With x_r the numbers
/// of rank r, P ranks, p' the largest power of two that is not above P:
///  - pairwise: ((x_0 + x_1) + x_2) + ..., as the parameter server;
///  - ring: shard c from rank c on, ((x_c + x_{c+1}) + x_{c+2}) + ..., indices mod P;
///  - halving_doubling: x_i + x_{i+p'} first, then halves, the largest distance first: of four (x_0 + x_2) + (x_1 + x_3).
///
/// In 16 bits each rank's numbers are rounded, its own too, added as float in rank order, and the sum is rounded on its way back: with
/// rounding [.], [(([x_0] + [x_1]) + [x_2]) + ...]. So a sum depends neither on who adds nor on how layers are cut into buckets, chunks
/// and shards. One rank sends nothing and rounds nothing. What rounding takes away is lost, unless the caller keeps it. Finite numbers
/// beyond the range of float16 become its largest; NaN and infinity stay what they are.
namespace lamina::inline LAMINA_ABI::collectives {

/// Where the elements from `sender` are held on `rank`: the ranks but `rank` itself, in order.
[[nodiscard]] constexpr std::size_t held_place(std::size_t rank, std::size_t sender) noexcept {
  return sender < rank ? sender : sender - 1;
}

/// Of the types as which numbers travel to be summed: "as_is", "float16", "bfloat16".
[[nodiscard]] constexpr const char* name_of(payload_type which) noexcept {
  return detail::name_in({"as_is", "float16", "bfloat16"}, which);
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

/// own <- the sum over all ranks in rank order of numbers as they have travelled, the own ones as well; the sum is not rounded. `held` has
/// own.size() numbers of each other rank, by held_place; as_is they are floats, where floats may lie.
inline void fold_in_rank_order(payload_type type, std::size_t rank, std::size_t ranks, std::span<float> own,
                               std::span<const std::byte> held) {
  constexpr std::size_t block_elements = 1024;  // stays in the first cache
  const std::size_t bytes = payload_bytes<float>(type, 1);
  std::array<float, block_elements> total{};
  std::array<float, block_elements> next{};
  std::array<std::byte, sizeof(float) * block_elements> narrowed{};
  for (std::size_t begin = 0; begin < own.size(); begin += block_elements) {
    const std::span<float> here = own.subspan(begin, (std::min)(block_elements, own.size() - begin));
    const std::span<float> sum = std::span(total).first(here.size());
    const auto numbers_of = [&](std::size_t r) -> std::span<const float> {
      const std::byte* from = narrowed.data();
      if (r != rank) from = held.data() + (held_place(rank, r) * own.size() + begin) * bytes;
      if (type != payload_type::as_is) {
        if (r == rank) detail::narrow(type, here, narrowed.data());
        detail::widen(type, from, std::span(next).first(here.size()));
        return std::span(next).first(here.size());
      }
      if (r == rank) return here;
      return {reinterpret_cast<const float*>(from), here.size()};
    };
    std::ranges::copy(numbers_of(0), sum.begin());
    for (std::size_t r = 1; r < ranks; ++r)
      lamina::detail::add_elements(sum.data(), numbers_of(r).data(), sum.size());
    std::ranges::copy(sum, here.begin());
  }
}

}  // namespace lamina::inline LAMINA_ABI::collectives
