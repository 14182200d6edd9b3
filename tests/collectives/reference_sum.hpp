// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/collectives/schedule.hpp"
#include "lamina/detail/finite.hpp"

namespace lamina_test {

using lamina::collectives::algorithm;

// The sum of one element: the order in plain recursion, written apart from the schedules, whose oracle it is.
template <class Input>
float halves_sum(const Input& x, std::size_t first, std::size_t stride, std::size_t count) {
  if (count == 1) return x(first);
  return lamina::detail::rounded(halves_sum(x, first, 2 * stride, count / 2) +
                                 halves_sum(x, first + stride, 2 * stride, count / 2));
}
template <class Input>
float chain_sum(const Input& x, std::size_t first, std::size_t ranks) {
  float total = x(first);
  for (std::size_t i = 1; i < ranks; ++i) total = lamina::detail::rounded(total + x((first + i) % ranks));
  return total;
}

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
  std::size_t shard = 0;
  for (std::size_t i = 0; i < elements; ++i) {
    const auto x = [&](std::size_t r) { return inputs[r][i]; };
    const auto folded = [&](std::size_t r) {
      return r + doubled < ranks ? lamina::detail::rounded(x(r) + x(r + doubled)) : x(r);
    };
    while (i >= lamina::collectives::detail::shard_of(elements, ranks, shard).end) ++shard;
    switch (how) {
      case algorithm::pairwise:
        sum[i] = chain_sum(x, 0, ranks);
        break;
      case algorithm::ring:
        sum[i] = chain_sum(x, shard, ranks);
        break;
      case algorithm::halving_doubling:
        sum[i] = halves_sum(folded, 0, 1, doubled);
        break;
    }
  }
  return sum;
}

}  // namespace lamina_test
