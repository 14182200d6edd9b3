// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "lamina/detail/abi.hpp"

/// Collectives that overlap with the computation: sums over all ranks that run while backward goes on.
///
/// schedule.hpp says who sends what to whom, sum.hpp in which order numbers are added, cost.hpp what that takes, plan.hpp which
/// layers go together and by which algorithm. channel.hpp carries messages, executor.hpp runs one schedule over a channel, and
/// engine.hpp runs those of a plan beside the computation. All of them need exceptions.
namespace lamina::inline LAMINA_ABI::collectives {

/// How a collective is made of messages between two ranks. The numbers travel in the header of a round.
enum class algorithm : std::uint8_t {
  pairwise = 0,  ///< each rank gets its slice from all others, adds in rank order, and hands the sum round
  ring = 1,      ///< slices go round, once to be added up and once to be handed on
  recursive_doubling = 2,  ///< a butterfly of whole vectors: fewest rounds, most bytes
  halving_doubling = 3,    ///< a butterfly of halves (Rabenseifner): few rounds and few bytes
  tree = 4,                ///< binomial, to rank 0 and back
};

/// What all ranks do together. The numbers travel in the header of a round.
enum class operation : std::uint8_t {
  all_reduce = 0,      ///< all ranks end with the sum of all
  reduce_scatter = 1,  ///< each rank ends with the sum of the elements that it owns (owned_elements)
  all_gather = 2,      ///< each rank hands the elements that it owns to all others
};

/// In the order of their numbers.
inline constexpr std::array all_algorithms = {algorithm::pairwise, algorithm::ring,
                                              algorithm::recursive_doubling, algorithm::halving_doubling,
                                              algorithm::tree};
inline constexpr std::array all_operations = {operation::all_reduce, operation::reduce_scatter,
                                              operation::all_gather};

/// "pairwise", "ring", ...; "unknown" for a number that is none of them.
[[nodiscard]] constexpr const char* name_of(algorithm which) noexcept {
  constexpr std::array names = {"pairwise", "ring", "recursive_doubling", "halving_doubling", "tree"};
  const auto index = static_cast<std::size_t>(which);
  return index < names.size() ? names[index] : "unknown";
}

/// "all_reduce", ...; "unknown" for a number that is none of them.
[[nodiscard]] constexpr const char* name_of(operation which) noexcept {
  constexpr std::array names = {"all_reduce", "reduce_scatter", "all_gather"};
  const auto index = static_cast<std::size_t>(which);
  return index < names.size() ? names[index] : "unknown";
}

/// The algorithm of that name. Throws std::invalid_argument that lists the names.
[[nodiscard]] inline algorithm parse_algorithm(std::string_view name) {
  std::string known;
  for (const algorithm each : all_algorithms) {
    if (name == name_of(each)) return each;
    known += (known.empty() ? "" : ", ") + std::string(name_of(each));
  }
  throw std::invalid_argument("no algorithm '" + std::string(name) + "'; there are: " + known);
}

/// Whether the algorithm has two halves, a reduce_scatter and an all_gather. Every algorithm has an all_reduce.
[[nodiscard]] constexpr bool is_defined(operation what, algorithm how) noexcept {
  return what == operation::all_reduce || (how != algorithm::recursive_doubling && how != algorithm::tree);
}

}  // namespace lamina::inline LAMINA_ABI::collectives
