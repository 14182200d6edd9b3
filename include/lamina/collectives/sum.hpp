// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/collectives/algorithm.hpp"
#include "lamina/collectives/schedule.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/elementwise.hpp"
#include "lamina/detail/rounding.hpp"

/// The order in which numbers are added: a sum of floats is then the same bits on all ranks and in every run. Which rank adds two
/// numbers does not matter, since the addition of two is commutative; which two are added does.
///
/// With x_r the numbers of rank r, P ranks, p' the largest power of two that is not above P:
///  - pairwise: ((x_0 + x_1) + x_2) + ..., as the parameter server;
///  - ring: slice c from rank c on, ((x_c + x_{c+1}) + x_{c+2}) + ..., indices mod P;
///  - recursive_doubling, halving_doubling: x_i + x_{i+p'} first, then halves, the largest distance first: of four
///    (x_0 + x_2) + (x_1 + x_3);
///  - tree: neighbours first, of four (x_0 + x_1) + (x_2 + x_3).
namespace lamina::inline LAMINA_ABI::collectives {

/// to[i] += from[i]. The same bits at every instruction set, also with -ffast-math.
inline void add_to(std::span<float> to, std::span<const float> from) {
  lamina::detail::add_elements(to.data(), from.data(), to.size());
}

/// Where the elements from `sender` are held on `rank`: the ranks but `rank` itself, in order.
[[nodiscard]] constexpr std::size_t held_place(std::size_t rank, std::size_t sender) noexcept {
  return sender < rank ? sender : sender - 1;
}

/// own <- the sum over all ranks in rank order. `held` has own.size() elements of each other rank, by held_place, and is
/// overwritten.
inline void fold_in_rank_order(std::size_t rank, std::size_t ranks, std::span<float> own,
                               std::span<float> held) {
  const auto of = [&](std::size_t r) {
    return r == rank ? own : held.subspan(held_place(rank, r) * own.size(), own.size());
  };
  const std::span<float> total = of(0);
  for (std::size_t r = 1; r < ranks; ++r) add_to(total, of(r));
  if (rank != 0) std::ranges::copy(total, own.begin());
}

namespace detail {

// The sum of one element: the order in plain recursion, written apart from the schedules, whose oracle it is.
template <class Input>
float halves_sum(const Input& x, std::size_t first, std::size_t stride, std::size_t count) {
  if (count == 1) return x(first);
  return lamina::detail::rounded(halves_sum(x, first, 2 * stride, count / 2) +
                                 halves_sum(x, first + stride, 2 * stride, count / 2));
}
template <class Input>
float tree_sum(const Input& x, std::size_t first, std::size_t width, std::size_t ranks) {
  if (width == 1) return x(first);
  const float lower = tree_sum(x, first, width / 2, ranks);
  const std::size_t middle = first + width / 2;
  return middle < ranks ? lamina::detail::rounded(lower + tree_sum(x, middle, width / 2, ranks)) : lower;
}
template <class Input>
float chain_sum(const Input& x, std::size_t first, std::size_t ranks) {
  float total = x(first);
  for (std::size_t i = 1; i < ranks; ++i) total = lamina::detail::rounded(total + x((first + i) % ranks));
  return total;
}

}  // namespace detail

/// The sum that the algorithm is to give of the inputs of all ranks, by plain loops: an oracle, apart from schedules and kernels.
/// Throws std::invalid_argument without ranks, or where lengths differ.
[[nodiscard]] inline std::vector<float> reference_sum(algorithm how,
                                                      std::span<const std::vector<float>> inputs) {
  const std::size_t ranks = inputs.size();
  if (ranks == 0) throw std::invalid_argument("a sum over no ranks");
  const std::size_t elements = inputs[0].size();
  for (std::size_t r = 0; r < ranks; ++r) {
    if (inputs[r].size() != elements) {
      throw std::invalid_argument("rank " + std::to_string(r) + " has " + std::to_string(inputs[r].size()) +
                                  " elements, rank 0 has " + std::to_string(elements));
    }
  }
  const std::size_t doubled = std::bit_floor(ranks);
  std::vector<float> sum(elements);
  std::size_t slice = 0;
  for (std::size_t i = 0; i < elements; ++i) {
    const auto x = [&](std::size_t r) { return inputs[r][i]; };
    const auto folded = [&](std::size_t r) {
      return r + doubled < ranks ? lamina::detail::rounded(x(r) + x(r + doubled)) : x(r);
    };
    while (i >= detail::slice_of(elements, ranks, slice).end) ++slice;
    switch (how) {
      case algorithm::pairwise:
        sum[i] = detail::chain_sum(x, 0, ranks);
        break;
      case algorithm::ring:
        sum[i] = detail::chain_sum(x, slice, ranks);
        break;
      case algorithm::recursive_doubling:
      case algorithm::halving_doubling:
        sum[i] = detail::halves_sum(folded, 0, 1, doubled);
        break;
      case algorithm::tree:
        sum[i] = detail::tree_sum(x, 0, std::bit_ceil(ranks), ranks);
        break;
    }
  }
  return sum;
}

}  // namespace lamina::inline LAMINA_ABI::collectives
