// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/cuda/detail/team.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"

/// Where a sum over keys in ascending order exceeds a limit, by one team and without atomic operations: what
/// lamina::threshold_search does by the weight of what stands before a pivot.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// A layer as a search sees it. Without elements it counts for nothing.
struct alignas(16) candidate {
  unsigned long long key;
  unsigned long long elements;
};

/// The first key in ascending order with which the sum of the elements is greater than the limit.
struct crossing {
  bool is_found;  // not if the sum never is
  unsigned long long key;
  unsigned long long before;  // elements of smaller keys
};

/// So many candidates are ranked at once: each thread compares its own with all of them. More are narrowed down before: as many of
/// them are ranked as a sample, and a pass adds up what lies below and between two of the sample, around the place where it
/// crosses. A second pass keeps the part that holds the crossing. Both keys are left out of it, so each round leaves less, also
/// of layers that are tied, whatever the exponents. Sums are of integers and any two keys will do, so neither the team's size
/// nor the sample changes what is found.
class crossing_search {
 public:
  static constexpr unsigned ranked_at_most = 256;

  struct shared_memory {
    crossing ranked;
    unsigned position;  // of the crossing among the keys
    candidate entries[ranked_at_most];
    unsigned long long sorted[ranked_at_most];  // their keys
    union {
      team_scratch<5> sums;
      team_scratch<1> places;
    };
  };

  /// Called by all of the team, which all get it; entry_of(i) is the i-th of `count`, fewer than 2^32. `kept` has room for all of
  /// them where they are more than ranked_at_most. Two reads of them and one write of the about 12 % that are left, as a rule; then
  /// the same of those, three rounds for 100,000.
  LAMINA_ANY_CALLER template <class Team, class Entry>
  LAMINA_HOST_DEVICE LAMINA_CALLED static crossing find(const Team& team, shared_memory& shared,
                                                        candidate* kept, std::size_t count, double limit,
                                                        const Entry& entry_of) {
    range within = {0, ~0ULL, 0};
    for (bool is_kept = false;; is_kept = true) {
      const auto entry = [&](std::size_t i) { return is_kept ? kept[i] : entry_of(i); };
      const crossing ranked = rank(team, shared, count, within.before, limit, entry);
      if (count <= ranked_at_most) return ranked;
      const unsigned middle = ranked.is_found ? shared.position : ranked_at_most - 1;
      const unsigned long long low = shared.sorted[middle > margin ? middle - margin : 0];
      const unsigned long long high =
          shared.sorted[middle + margin < ranked_at_most ? middle + margin : ranked_at_most - 1];
      crossing found = {false, 0, 0};
      if (!narrow(team, shared, count, limit, entry, low, high, within, found)) return found;
      count = keep(team, shared, kept, count, entry, within);
    }
  }

 private:
  // Loads on their way at a time.
  static constexpr unsigned at_once = 8;
  // Places of the sample on either side of where it crosses: two standard deviations at most, where all have as many elements.
  static constexpr unsigned margin = 16;

  // Calls visit for the thread's entries, `at_once` of them at a time and all of the team together; what is beyond the last has no
  // elements.
  LAMINA_ANY_CALLER template <class Team, class Entry, class Visit>
  LAMINA_HOST_DEVICE static void for_each(const Team& team, std::size_t count, const Entry& entry_of,
                                          const Visit& visit) {
    const std::size_t stride = team.threads();
    for (std::size_t first = 0; first < count; first += at_once * stride) {
      candidate loaded[at_once];
      for (unsigned k = 0; k < at_once; ++k) {
        const std::size_t i = first + k * stride + team.thread();
        loaded[k] = i < count ? entry_of(i) : candidate{0, 0};
      }
      visit(loaded);
    }
  }

  // Which keys are left, and the elements of those below.
  struct range {
    unsigned long long first;
    unsigned long long last;
    unsigned long long before;
  };

  // Whether more is to be done: the crossing is neither low, high nor beyond all.
  LAMINA_ANY_CALLER template <class Team, class Entry>
  LAMINA_HOST_DEVICE static bool narrow(const Team& team, shared_memory& shared, std::size_t count,
                                        double limit, const Entry& entry_of, unsigned long long low,
                                        unsigned long long high, range& within, crossing& found) {
    // Below low, up to it, below high, up to it, and all.
    unsigned long long sums[5] = {};
    for_each(team, count, entry_of, [&](const candidate(&loaded)[at_once]) {
      for (const candidate& each : loaded) {
        if (each.key < low) sums[0] += each.elements;
        if (each.key <= low) sums[1] += each.elements;
        if (each.key < high) sums[2] += each.elements;
        if (each.key <= high) sums[3] += each.elements;
        sums[4] += each.elements;
      }
    });
    team.combine(sums, shared.sums, sum_of());
    const unsigned long long before = within.before;
    const auto exceeds = [&](unsigned long long sum) { return static_cast<double>(before + sum) > limit; };
    if (!exceeds(sums[4])) return false;
    if (exceeds(sums[0])) {
      within.last = low - 1;
    } else if (exceeds(sums[1])) {
      found = {true, low, before + sums[0]};
    } else if (exceeds(sums[2])) {
      within = {low + 1, high - 1, before + sums[1]};
    } else if (exceeds(sums[3])) {
      found = {true, high, before + sums[2]};
    } else {
      within.first = high + 1;
      within.before = before + sums[3];
    }
    return !found.is_found;
  }

  // Those that have elements and keys within the range. `kept` may be where they come from: what the team writes is where it has
  // read before.
  LAMINA_ANY_CALLER template <class Team, class Entry>
  LAMINA_HOST_DEVICE static std::size_t keep(const Team& team, shared_memory& shared, candidate* kept,
                                             std::size_t count, const Entry& entry_of, const range& within) {
    std::size_t all = 0;
    for_each(team, count, entry_of, [&](const candidate(&loaded)[at_once]) {
      const auto is_kept = [&](const candidate& each) {
        return each.elements > 0 && each.key >= within.first && each.key <= within.last;
      };
      unsigned long long place[1] = {0};
      for (const candidate& each : loaded) place[0] += is_kept(each) ? 1 : 0;
      const std::size_t more = team.sum_before(place, shared.places);
      for (const candidate& each : loaded) {
        if (is_kept(each)) kept[all + place[0]++] = each;
      }
      all += more;
    });
    return all;
  }

  // Multiples of the golden ratio lie evenly and follow no period of the model's layers.
  LAMINA_HOST_DEVICE static std::size_t place_of_sample(unsigned i, std::size_t count) {
    const std::uint32_t fraction = i * 2654435769U;
    return static_cast<std::size_t>((static_cast<std::uint64_t>(fraction) * count) >> 32U);
  }

  // The crossing among all entries, or in their stead among a sample, each of which stands for as many as each: then it is a guess.
  // The keys in order and the crossing's place are in `shared`.
  LAMINA_ANY_CALLER template <class Team, class Entry>
  LAMINA_HOST_DEVICE static crossing rank(const Team& team, shared_memory& shared, std::size_t all,
                                          unsigned long long before, double limit, const Entry& entry_of) {
    const bool is_sample = all > ranked_at_most;
    const auto count = static_cast<unsigned>(is_sample ? ranked_at_most : all);
    if (is_sample) {
      limit = (limit - static_cast<double>(before)) * (ranked_at_most / static_cast<double>(all));
      before = 0;
    }
    team.barrier();  // the sample before may still be read, and what is kept still be written
    if (team.thread() == 0) shared.ranked = {false, 0, 0};
    for (unsigned i = team.thread(); i < count; i += team.threads())
      shared.entries[i] = entry_of(is_sample ? place_of_sample(i, all) : i);
    team.barrier();
    for (unsigned i = team.thread(); i < count; i += team.threads()) {
      const candidate own = shared.entries[i];
      unsigned long long smaller = before;
      unsigned long long tied = 0;
      unsigned position = 0;
      bool is_first = own.elements > 0;
      for (unsigned other = 0; other < count; ++other) {
        const candidate each = shared.entries[other];
        const bool is_before = other < i;
        if (each.key < own.key) smaller += each.elements;
        if (each.key == own.key) tied += each.elements;
        if (each.key < own.key || (each.key == own.key && is_before)) ++position;
        if (each.key == own.key && is_before && each.elements > 0) is_first = false;
      }
      shared.sorted[position] = own.key;
      if (is_first && static_cast<double>(smaller) <= limit && static_cast<double>(smaller + tied) > limit) {
        shared.ranked = {true, own.key, smaller};
        shared.position = position;
      }
    }
    team.barrier();
    return shared.ranked;
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
