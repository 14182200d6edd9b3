// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/collectives/schedule.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"

/// \file
/// The seconds that a collective takes, by which an algorithm and the size of buckets are chosen. Read it after schedule.hpp.
///
/// They are the seconds of its rounds, one after the other, each as long as its slowest rank. Rounds that are under way together are as
/// one: they share a link, so their bytes add up, and one latency.
namespace lamina::inline LAMINA_ABI::collectives {

/// The constants of a network and its machines, as benchmarks/network/calibration.hpp measures them.
struct cost_table {
  double alpha = 0;           ///< seconds a message
  double beta_one_way = 0;    ///< seconds a byte to one rank and from another, or one way alone
  double beta_both_ways = 0;  ///< seconds a byte to a rank and from the same at once
  double gamma = 0;           ///< seconds to add a byte

  bool operator==(const cost_table&) const = default;
};

/// Gigabit Ethernet through TCP, for a plan before anything is measured: 300 µs a message, goodput 1448/1514 of 1 Gb/s.
inline constexpr cost_table gigabit_costs = {3e-4, 8.365e-9, 8.365e-9, 2e-10};

/// Throws std::invalid_argument naming the constant unless each is finite and positive.
inline void check_costs(const cost_table& costs) {
  const std::pair<const char*, double> all[] = {{"alpha", costs.alpha},
                                                {"beta_one_way", costs.beta_one_way},
                                                {"beta_both_ways", costs.beta_both_ways},
                                                {"gamma", costs.gamma}};
  for (const auto& [name, value] : all) {
    if (lamina::detail::is_finite(value) && value > 0) continue;
    throw std::invalid_argument("the cost " + std::string(name) + " is " + std::to_string(value) +
                                ": it must be finite and above 0");
  }
}

/// Seconds that a collective over `elements` floats takes, on the rank for which that is most: alpha of each round, or of all that are
/// under way together; of each round the larger of the bytes out and in times beta (both_ways where both are of one peer), and the bytes
/// added, as float, times gamma. Throws as rounds_of does. Cost: O(P²).
[[nodiscard]] inline double seconds_of(operation what, algorithm how, std::size_t ranks, std::size_t elements,
                                       const cost_table& costs) {
  // Of rounds under way together.
  std::vector<double> slowest;
  std::vector<double> of_rank;
  std::vector<round> rounds;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    rounds_of(what, how, ranks, rank, elements, rounds);
    of_rank.clear();
    for (const round& each : rounds) {
      if (!each.joins) of_rank.push_back(0);
      if (!each.send && !each.receive) continue;
      const std::size_t out = each.send ? each.send->elements.size() : 0;
      const std::size_t in = each.receive ? each.receive->elements.size() : 0;
      const bool is_exchange = each.send && each.receive && each.send->peer == each.receive->peer;
      const double beta = is_exchange ? costs.beta_both_ways : costs.beta_one_way;
      const std::size_t added = (each.on_arrival == arrival::add ? in : 0) + each.fold.size() * (ranks - 1);
      if (of_rank.back() == 0) of_rank.back() = costs.alpha;
      of_rank.back() += static_cast<double>((std::max)(out, in) * sizeof(float)) * beta +
                        static_cast<double>(added * sizeof(float)) * costs.gamma;
    }
    slowest.resize(of_rank.size());
    std::ranges::transform(slowest, of_rank, slowest.begin(),
                           [](double one, double other) { return (std::max)(one, other); });
  }
  double total = 0;
  for (const double each : slowest) total += each;
  return total;
}

/// The algorithm whose all_reduce, in collectives of at most `chunk` elements, takes the fewest seconds; where several do, the first of
/// ring, halving_doubling, pairwise.
[[nodiscard]] inline algorithm cheapest(std::size_t ranks, std::size_t elements, const cost_table& costs,
                                        std::size_t chunk = (std::numeric_limits<std::size_t>::max)()) {
  algorithm best = algorithm::ring;
  double least = std::numeric_limits<double>::infinity();
  for (const algorithm each : {algorithm::ring, algorithm::halving_doubling, algorithm::pairwise}) {
    const auto seconds_for = [&](std::size_t part) {
      return part == 0 ? 0 : seconds_of(operation::all_reduce, each, ranks, part, costs);
    };
    const std::size_t whole = elements / chunk;
    const double seconds =
        (whole == 0 ? 0 : static_cast<double>(whole) * seconds_for(chunk)) + seconds_for(elements % chunk);
    // Sums that are equal but for their rounding are ties.
    if (seconds < least * (1 - 1e-9)) {
      best = each;
      least = seconds;
    }
  }
  return best;
}

}  // namespace lamina::inline LAMINA_ABI::collectives
