// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "lamina/cuda/detail/thread_block.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"

/// Where a sum over keys in ascending order exceeds a limit, by one thread block: what lamina::threshold_search does by the weight of what
/// stands before a pivot.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Integers that order as the numbers do, with the two zeros as one; not of NaN.
constexpr std::uint64_t key_of(double value) {
  constexpr std::uint64_t sign = std::uint64_t{1} << 63U;
  const auto bits = std::bit_cast<std::uint64_t>(value == 0 ? 0.0 : value);
  return (bits & sign) != 0 ? ~bits : bits | sign;
}
constexpr double value_of(std::uint64_t key) {
  constexpr std::uint64_t sign = std::uint64_t{1} << 63U;
  return std::bit_cast<double>((key & sign) != 0 ? key & ~sign : ~key);
}

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

/// The range of the keys is cut into 256 bins, in which the elements add up; the bin in which the sum crosses the limit is the next
/// range, until that is one key. So there are eight rounds at most, and two or three of layers that have different values. Sums are of
/// integers, so neither the number of threads nor the order of its threads changes what is found.
class crossing_search {
 public:
  static constexpr unsigned bins = 256;

  struct shared_memory {
    shared_sum elements[bins];
    unsigned bin;  // in which the sum crosses the limit
    unsigned long long before;
    std::uint32_t kept;
    union {
      block_scratch<2> least;
      block_scratch<1> sums;
    };
  };

  /// Called by all of the cta, which all get it; entry_of(i) is the i-th of `count`, fewer than 2^32. `kept` has room for twice as many.
  /// Two reads of all of them in the first round, one more and a write of what is left in the second, and from there on of that alone.
  LAMINA_ANY_CALLER template <class ThreadBlock, class Entry>
  LAMINA_HOST_DEVICE LAMINA_CALLED static crossing find(const ThreadBlock& cta, shared_memory& shared,
                                                        candidate* kept, std::size_t count, double limit,
                                                        const Entry& entry_of) {
    const std::size_t room = count;
    const candidate* from = nullptr;
    const auto entry = [&](std::size_t i) { return from == nullptr ? entry_of(i) : from[i]; };
    unsigned long long first = 0;  // the range, and the elements below it
    unsigned long long last = ~0ULL;
    unsigned long long before = 0;
    const auto is_in_range = [&](const candidate& each) {
      return each.elements > 0 && each.key >= first && each.key <= last;
    };
    const auto exceeds = [&](unsigned long long sum) { return static_cast<double>(sum) > limit; };
    for (unsigned round = 0;; ++round) {
      candidate* const to = round == 0 ? nullptr : kept + (round % 2) * room;
      cta.barrier();  // what was found before may still be read
      if (cta.thread() == 0) shared.kept = 0;
      for (unsigned bin = cta.thread(); bin < bins; bin += cta.threads()) shared.elements[bin] = {0, 0};
      cta.barrier();
      unsigned long long least[2] = {~0ULL, ~0ULL};  // of keys, and of their complements
      for_each(cta, count, entry, [&](const candidate& each) {
        if (!is_in_range(each)) return;
        least[0] = lesser(least[0], each.key);
        least[1] = lesser(least[1], ~each.key);
        if (to != nullptr) to[cta.count(shared.kept)] = each;
      });
      cta.least(least, shared.least);
      const unsigned long long low = least[0];
      const unsigned long long high = ~least[1];
      if (low > high) return {false, 0, 0};
      if (to != nullptr) {
        from = to;
        count = shared.kept;
      }
      unsigned shift = 0;
      while ((high - low) >> shift >= bins) ++shift;
      for_each(cta, count, entry, [&](const candidate& each) {
        if (is_in_range(each)) cta.add(shared.elements[(each.key - low) >> shift], each.elements);
      });
      cta.barrier();
      if (!cross(cta, shared, before, exceeds)) return {false, 0, 0};
      before = shared.before;
      first = low + (static_cast<unsigned long long>(shared.bin) << shift);
      if (shift == 0) return {true, first, before};
      const unsigned long long width = (1ULL << shift) - 1;
      last = high - first < width ? high : first + width;
    }
  }

 private:
  // Calls visit for the thread's entries, which are on their way several at a time.
  LAMINA_ANY_CALLER template <class ThreadBlock, class Entry, class Visit>
  LAMINA_HOST_DEVICE static void for_each(const ThreadBlock& cta, std::size_t count, const Entry& entry_of,
                                          const Visit& visit) {
    constexpr unsigned at_once = 4;
    const std::size_t stride = cta.threads();
    for (std::size_t i = cta.thread(); i < count; i += at_once * stride) {
      candidate loaded[at_once];
      for (unsigned k = 0; k < at_once; ++k)
        loaded[k] = i + k * stride < count ? entry_of(i + k * stride) : candidate{0, 0};
      for (const candidate& each : loaded) visit(each);
    }
  }

  // Whether the sum over the bins crosses the limit; all threads may read where, then.
  LAMINA_ANY_CALLER template <class ThreadBlock, class Exceeds>
  LAMINA_HOST_DEVICE static bool cross(const ThreadBlock& cta, shared_memory& shared,
                                       unsigned long long before, const Exceeds& exceeds) {
    const unsigned each = (bins + cta.threads() - 1) / cta.threads();
    const unsigned begin = cta.thread() * each < bins ? cta.thread() * each : bins;
    const unsigned end = begin + each < bins ? begin + each : bins;
    unsigned long long own = 0;
    for (unsigned bin = begin; bin < end; ++bin) own += shared.elements[bin].value();
    if (!exceeds(before + cta.sum_before(own, shared.sums))) return false;
    unsigned long long sum = before + own;
    for (unsigned bin = begin; bin < end; ++bin) {
      const unsigned long long next = sum + shared.elements[bin].value();
      if (!exceeds(sum) && exceeds(next)) {
        shared.bin = bin;
        shared.before = sum;
      }
      sum = next;
    }
    cta.barrier();
    return true;
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
