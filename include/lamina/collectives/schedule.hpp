// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "lamina/detail/raise.hpp"

/// \file
/// Who sends which elements to whom, in which round, as data: no communication here. Read this header first.
///
/// What is claimed of an algorithm (each send has its receive, the bytes, the order of additions) can so be checked for all ranks at
/// once, and the executor only executes. All headers of this folder need exceptions.
namespace lamina::inline LAMINA_ABI::collectives {

/// How a collective is made of messages between two ranks. The numbers travel in the header of a round.
enum class algorithm : std::uint8_t {
  pairwise = 0,  ///< each rank gets its shard from all others, adds in rank order, and hands the sum round
  ring = 1,      ///< shards go round, once to be added up and once to be handed on
  halving_doubling = 2,  ///< a butterfly of halves (Rabenseifner 2004): few rounds and few bytes
};

/// What all ranks do together. The numbers travel in the header of a round.
enum class operation : std::uint8_t {
  all_reduce = 0,      ///< all ranks end with the sum of all
  reduce_scatter = 1,  ///< each rank ends with the sum of the elements that it owns (owned_elements)
  all_gather = 2,      ///< each rank hands the elements that it owns to all others
};

/// In the order of their numbers.
inline constexpr std::array all_algorithms = {algorithm::pairwise, algorithm::ring,
                                              algorithm::halving_doubling};

namespace detail {

template <class Enum>
constexpr const char* name_in(std::initializer_list<const char*> names, Enum which) noexcept {
  const auto index = static_cast<std::size_t>(which);
  return index < names.size() ? names.begin()[index] : "unknown";
}

}  // namespace detail

/// "pairwise", "ring", ...; "unknown" for a number that is none of them.
[[nodiscard]] constexpr const char* name_of(algorithm which) noexcept {
  return detail::name_in({"pairwise", "ring", "halving_doubling"}, which);
}
/// Likewise.
[[nodiscard]] constexpr const char* name_of(operation which) noexcept {
  return detail::name_in({"all_reduce", "reduce_scatter", "all_gather"}, which);
}

/// Elements [begin, end) of the vector of a collective.
struct element_range {
  std::size_t begin = 0;
  std::size_t end = 0;

  [[nodiscard]] constexpr std::size_t size() const noexcept { return end - begin; }
  [[nodiscard]] constexpr bool overlaps(const element_range& other) const noexcept {
    return begin < other.end && other.begin < end;
  }
  bool operator==(const element_range&) const = default;
};

/// What becomes of elements that arrive.
enum class arrival {
  add,   ///< added to those of this rank
  hold,  ///< kept apart, by sender, until all of them are there: a later round folds them
  put,   ///< put in the place of those of this rank
};

/// Elements to or from another rank. Never empty: where a range is, nothing is sent.
struct transfer {
  std::size_t peer = 0;
  element_range elements;
};

/// One round of one rank: at most one message out and one in. Rounds are counted alike on all ranks, so a rank that has nothing
/// to do in one has an empty round there.
struct round {
  /// Under way together with the round before it: neither waits for the other.
  bool joins = false;
  std::optional<transfer> send;
  std::optional<transfer> receive;
  arrival on_arrival = arrival::put;
  /// Not empty: when the round is done, these elements become the sum over all ranks in rank order, of those that were held and,
  /// in this rank's place, of its own.
  element_range fold;
};

/// Rounds under way together, at most. A rank then does not wait for one partner's
/// socket while another link is idle, and all of them have one latency.
inline constexpr std::size_t most_joined = 8;

namespace detail {

using lamina::detail::refuse;

inline void check_rank(std::size_t rank, std::size_t ranks) {
  if (rank >= ranks)
    refuse<std::out_of_range>("rank ", rank, " is out of range: there are ", ranks, " ranks");
}

/// Writes the rounds of one rank: of each algorithm the half that adds, and the half that hands the sums round.
class schedule_writer {
 public:
  /// Throws std::out_of_range for a rank that there is not.
  schedule_writer(std::vector<round>& rounds, std::size_t ranks, std::size_t rank, std::size_t elements)
      : rounds_(rounds), ranks_(ranks), rank_(rank), elements_(elements), doubled_(std::bit_floor(ranks)) {
    check_rank(rank, ranks);
    rounds_.clear();
  }

  void write(algorithm how, bool gathers) {
    if (how == algorithm::pairwise) return pairwise(gathers);
    if (how == algorithm::ring) return ring(gathers);
    if (!gathers) fold(gathers);
    for (std::size_t parts = 1; parts < doubled_; parts *= 2)
      exchange_halves(gathers ? doubled_ / (2 * parts) : parts, gathers);
    if (gathers) fold(gathers);
  }

  /// [n·i/P, n·(i+1)/P), rounded down; the same as 128 bits would give.
  [[nodiscard]] element_range shard(std::size_t index) const {
    const auto edge = [&](std::size_t i) { return elements_ / ranks_ * i + elements_ % ranks_ * i / ranks_; };
    return {edge(index), edge(index + 1)};
  }
  /// What this rank has kept of all after halvings into `parts`, 0 elements if it is beyond the power of two.
  [[nodiscard]] element_range halved(std::size_t parts) const {
    if (rank_ >= doubled_) return {};
    element_range own = all();
    for (std::size_t distance = doubled_ / 2; distance * parts >= doubled_ && distance > 0; distance /= 2)
      own = half(own, (rank_ & distance) != 0);
    return own;
  }

 private:
  [[nodiscard]] element_range all() const { return {0, elements_}; }
  [[nodiscard]] std::size_t after(std::size_t distance) const { return (rank_ + distance) % ranks_; }
  [[nodiscard]] std::size_t before(std::size_t distance) const {
    return (rank_ + 2 * ranks_ - distance) % ranks_;
  }
  [[nodiscard]] static element_range half(element_range of, bool upper) {
    const std::size_t middle = of.begin + of.size() / 2;
    return upper ? element_range{middle, of.end} : element_range{of.begin, middle};
  }

  void add_round(std::size_t to, element_range out, std::size_t from, element_range in, arrival on_arrival) {
    round& added = rounds_.emplace_back();
    if (out.size() > 0) added.send = {to, out};
    if (in.size() > 0) added.receive = {from, in};
    added.on_arrival = on_arrival;
  }

  void pairwise(bool gathers) {
    for (std::size_t d = 1; d < ranks_; ++d) {
      add_round(after(d), shard(gathers ? rank_ : after(d)), before(d), shard(gathers ? before(d) : rank_),
                gathers ? arrival::put : arrival::hold);
      rounds_.back().joins = (d - 1) % most_joined != 0;
    }
    if (!gathers && ranks_ > 1) rounds_.back().fold = shard(rank_);
  }
  // Shard c begins at rank c and is whole at rank c - 1, which then owns it.
  void ring(bool gathers) {
    for (std::size_t d = gathers ? ranks_ - 1 : 0, last = d + ranks_ - 1; d < last; ++d) {
      add_round(after(1), shard(before(d)), before(1), shard(before(d + 1)),
                gathers ? arrival::put : arrival::add);
    }
  }
  // Between partners that have the same one of so many parts, of which each keeps a half. Ranks beyond the power of two have none.
  void exchange_halves(std::size_t parts, bool gathers) {
    const std::size_t distance = doubled_ / (2 * parts);
    const bool is_upper = (rank_ & distance) != 0;
    const element_range own = half(halved(parts), is_upper);
    const element_range other = half(halved(parts), !is_upper);
    const std::size_t partner = rank_ ^ distance;
    add_round(partner, gathers ? own : other, partner, gathers ? other : own,
              gathers ? arrival::put : arrival::add);
  }
  // Ranks beyond the largest power of two give theirs to a partner, or get the sum back.
  void fold(bool gathers) {
    if (doubled_ == ranks_) return;
    const bool is_beyond = rank_ >= doubled_;
    const std::size_t partner = is_beyond ? rank_ - doubled_ : rank_ + doubled_;
    const element_range moved = partner < ranks_ ? all() : element_range{};
    const bool sends = is_beyond != gathers;
    add_round(partner, sends ? moved : element_range{}, partner, sends ? element_range{} : moved,
              gathers ? arrival::put : arrival::add);
  }

  std::vector<round>& rounds_;
  std::size_t ranks_;
  std::size_t rank_;
  std::size_t elements_;
  std::size_t doubled_;  // the largest power of two that is not above ranks_
};

}  // namespace detail

/// Writes the rounds of `rank` over what `rounds` holds; no allocation where its capacity is enough.
/// Throws std::out_of_range for a rank that there is not. Cost: O(P) rounds. The rounds depend on the arguments only.
inline void rounds_of(operation what, algorithm how, std::size_t ranks, std::size_t rank,
                      std::size_t elements, std::vector<round>& rounds) {
  detail::schedule_writer writer(rounds, ranks, rank, elements);
  if (what != operation::all_gather) writer.write(how, /*gathers=*/false);
  if (what != operation::reduce_scatter) writer.write(how, /*gathers=*/true);
}

/// The elements whose sum `rank` holds after a reduce_scatter, and which it hands round in an all_gather. Of pairwise shard r,
/// [n·r/P, n·(r+1)/P); of a ring shard r + 1, mod P; of halving_doubling what its halvings leave, and nothing on the ranks beyond
/// the power of two. Throws as rounds_of does.
[[nodiscard]] inline element_range owned_elements(algorithm how, std::size_t ranks, std::size_t rank,
                                                  std::size_t elements) {
  std::vector<round> unused;
  const detail::schedule_writer writer(unused, ranks, rank, elements);
  if (how == algorithm::pairwise) return writer.shard(rank);
  if (how == algorithm::ring) return writer.shard((rank + 1) % ranks);
  return writer.halved(std::bit_floor(ranks));
}

}  // namespace lamina::inline LAMINA_ABI::collectives
