// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "lamina/collectives/schedule.hpp"
#include "reference_sum.hpp"
#include "support.hpp"

/// What the tests of schedules and their fuzz target share: all ranks of a collective in one thread, round by round.
namespace lamina_test {

namespace collectives = lamina::collectives;

using rank_vectors = std::vector<std::vector<float>>;
using rank_schedules = std::vector<std::vector<collectives::round>>;

inline rank_vectors random_ranks(std::mt19937& random, std::size_t ranks, std::size_t elements) {
  rank_vectors made;
  for (std::size_t r = 0; r < ranks; ++r) made.push_back(random_fractions<float>(random, elements));
  return made;
}

inline std::vector<collectives::round> rounds_of(collectives::operation what, collectives::algorithm how,
                                                 std::size_t ranks, std::size_t rank, std::size_t elements) {
  std::vector<collectives::round> rounds;
  collectives::rounds_of(what, how, ranks, rank, elements, rounds);
  return rounds;
}

inline rank_schedules schedules_of(collectives::operation what, collectives::algorithm how, std::size_t ranks,
                                   std::size_t elements) {
  rank_schedules all;
  for (std::size_t r = 0; r < ranks; ++r) all.push_back(rounds_of(what, how, ranks, r, elements));
  return all;
}

/// What does not match: a send without its receive of the same elements in the same round, a rank out of range, elements that are
/// sent and overwritten in one round. Empty if all is well.
inline std::string mismatch_in(const rank_schedules& all, std::size_t elements) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() != all[0].size()) return "rank " + std::to_string(r) + " has another number of rounds";
    for (std::size_t k = 0; k < all[r].size(); ++k) {
      const collectives::round& own = all[r][k];
      const std::string where = "rank " + std::to_string(r) + ", round " + std::to_string(k);
      for (const auto* each : {&own.send, &own.receive}) {
        if (!each->has_value()) continue;
        const collectives::transfer& given = **each;
        if (given.peer >= all.size() || given.peer == r || given.elements.size() == 0 ||
            given.elements.end > elements || given.elements.begin > given.elements.end)
          return where + ": a transfer that cannot be";
        const collectives::round& theirs = all[given.peer][k];
        const auto& counterpart = each == &own.send ? theirs.receive : theirs.send;
        if (!counterpart || counterpart->peer != r) return where + ": nobody at the other end";
        if (counterpart->elements != given.elements && own.on_arrival != collectives::arrival::hold)
          return where + ": other elements at the other end";
        if (counterpart->elements.size() != given.elements.size()) return where + ": another length";
      }
      if (k == 0 && own.joins) return where + ": joins nothing";
      if (own.joins != all[0][k].joins) return where + ": joins where rank 0 does not";
      // Those that are under way together with it, from the first of them on.
      std::size_t first = k;
      while (all[r][first].joins) --first;
      for (std::size_t beside = first; beside < all[r].size() && (beside == first || all[r][beside].joins);
           ++beside) {
        if (own.on_arrival == collectives::arrival::put && all[r][beside].send && own.receive &&
            all[r][beside].send->elements.overlaps(own.receive->elements))
          return where + ": elements are sent while others are put in their place";
        if (own.joins && own.on_arrival == collectives::arrival::add) return where + ": adds and joins";
      }
    }
  }
  return "";
}

/// Runs the schedules on the vectors of the ranks.
inline void simulate(const rank_schedules& all, rank_vectors& vectors) {
  const std::size_t ranks = vectors.size();
  std::vector<rank_vectors> held(ranks, rank_vectors(ranks));
  for (std::size_t k = 0; k < all[0].size(); ++k) {
    const rank_vectors before = vectors;
    for (std::size_t r = 0; r < ranks; ++r) {
      const collectives::round& each = all[r][k];
      if (each.receive) {
        const std::size_t from = each.receive->peer;
        const collectives::element_range out = all[from][k].send->elements;
        for (std::size_t i = 0; i < out.size(); ++i) {
          const float arrived = before[from][out.begin + i];
          float& own = vectors[r][each.receive->elements.begin + i];
          if (each.on_arrival == collectives::arrival::add) own += arrived;
          if (each.on_arrival == collectives::arrival::put) own = arrived;
          if (each.on_arrival == collectives::arrival::hold) held[r][from].push_back(arrived);
        }
      }
      for (std::size_t i = each.fold.begin; i < each.fold.end; ++i) {
        const auto of = [&](std::size_t rank) {
          return rank == r ? before[r][i] : held[r][rank][i - each.fold.begin];
        };
        float total = of(0);
        for (std::size_t rank = 1; rank < ranks; ++rank) total += of(rank);
        vectors[r][i] = total;
      }
    }
  }
}

/// What one rank sends in a collective.
struct traffic {
  std::size_t messages = 0;  ///< one a round with a transfer, however many pieces it goes in
  std::size_t elements = 0;
};

inline traffic sent(std::span<const collectives::round> rounds) {
  traffic total;
  for (const collectives::round& each : rounds) {
    if (!each.send) continue;
    ++total.messages;
    total.elements += each.send->elements.size();
  }
  return total;
}

/// Bytes that a rank sends in an all_reduce by the closed formula, counted in elements; apart from the schedules.
inline std::size_t formula_of_sent(collectives::algorithm how, std::size_t ranks, std::size_t rank,
                                   std::size_t elements) {
  using collectives::algorithm;
  const auto shard = [&](std::size_t r) {
    return elements * (r % ranks + 1) / ranks - elements * (r % ranks) / ranks;
  };
  std::size_t doubled = 1;
  while (2 * doubled <= ranks) doubled *= 2;
  const std::size_t folded = rank < ranks - doubled ? elements : 0;
  if (how == algorithm::pairwise) return elements - shard(rank) + (ranks - 1) * shard(rank);
  if (how == algorithm::ring) return 2 * elements - shard(rank + 1) - shard(rank + 2);
  if (rank >= doubled) return elements;
  std::size_t begin = 0;
  std::size_t end = elements;
  std::size_t owned = 0;
  for (std::size_t d = doubled / 2; d > 0; d /= 2) {
    const std::size_t middle = begin + (end - begin) / 2;
    ((rank & d) != 0 ? begin : end) = middle;
    owned += end - begin;
  }
  return elements - (end - begin) + owned + folded;
}

}  // namespace lamina_test
