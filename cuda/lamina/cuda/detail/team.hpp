// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/host_device.hpp"

/// A kernel is written once, for a team of threads, which is a thread block on a GPU and the single thread below where Thrust
/// runs on a CPU. Of a team, groups take a block of 4,096 elements each: 16 threads with four of the 64 lanes of reduction.hpp on a
/// GPU, one thread with all of them on a CPU. A team has thread(), threads(), index() among the teams() of a launch, groups() and
/// group(), the one that the thread belongs to; it calls wait_for_launches() before it touches what an earlier launch writes.
///
/// A kernel is a type with
///
///     static constexpr unsigned threads;        of a team on a GPU
///     static constexpr unsigned teams_at_once;  at least, on a multiprocessor of a GPU: limits registers
///     struct shared_memory;                     a team's own
///     std::size_t teams(unsigned groups) const; that have work, where a team has so many groups
///     template <class Team> void operator()(const Team&, shared_memory&) const;
///
/// Teams of a launch run in any order, at the same time or not: none waits for another.
namespace lamina::inline LAMINA_ABI::cuda::detail {

inline constexpr unsigned most_threads = 1024;  // of a team

/// How many teams share `units` of work, a unit for each of their groups.
constexpr std::size_t teams_for(std::size_t units, unsigned groups) {
  return (units + groups - 1) / groups;
}

/// What a team exchanges numbers through, `Count` of each thread: shared memory of its own.
template <unsigned Count>
struct team_scratch {
  unsigned long long of_warp[Count][most_threads / 32];
  unsigned long long all;
};

/// A sum of integers that threads add to at the same time, in two words, since GPUs add words of 32 bits in shared memory at once
/// and those of 64 bits in a loop.
struct shared_sum {
  std::uint32_t low;
  std::uint32_t high;

  LAMINA_HOST_DEVICE unsigned long long value() const {
    return (static_cast<unsigned long long>(high) << 32U) + low;
  }
};

struct sum_of {
  LAMINA_HOST_DEVICE unsigned long long operator()(unsigned long long a, unsigned long long b) const {
    return a + b;
  }
};
struct least_of {
  LAMINA_HOST_DEVICE unsigned long long operator()(unsigned long long a, unsigned long long b) const {
    return b < a ? b : a;
  }
};

/// Whether this is the last of `count` arrivals at `counter`, which is 0 before the first and after the last. What the others wrote
/// before they arrived may be read then. Cost: an atomic addition.
LAMINA_HOST_DEVICE inline bool arrives_last(std::uint32_t& counter, std::uint32_t count) {
#if defined(__CUDA_ARCH__)
  std::uint32_t before = 0;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(&counter) : "memory");
  const bool is_last = before + 1 == count;
#else
  const bool is_last = __atomic_add_fetch(&counter, 1U, __ATOMIC_ACQ_REL) == count;
#endif
  if (is_last) counter = 0;
  return is_last;
}

/// A group of one thread, which has all lanes of a block.
class serial_group {
 public:
  static constexpr unsigned threads = 1;

  LAMINA_HOST_DEVICE explicit serial_group(unsigned index) : index_(index) {}
  /// Among the groups of its team.
  LAMINA_HOST_DEVICE unsigned index() const { return index_; }
  LAMINA_HOST_DEVICE unsigned thread() const { return 0; }
  LAMINA_HOST_DEVICE void barrier() const {}
  /// What the thread has whose number differs in the bit `distance`.
  template <class X>
  LAMINA_HOST_DEVICE X across(X own, unsigned) const {
    return own;
  }
  /// What a thread has.
  template <class X>
  LAMINA_HOST_DEVICE X from(X own, unsigned) const {
    return own;
  }
  /// Called by all of the group: as arrives_last, for all of it.
  LAMINA_HOST_DEVICE bool is_last_to_arrive(std::uint32_t& counter, std::uint32_t count) const {
    return arrives_last(counter, count);
  }

 private:
  unsigned index_;
};

class serial_team {
 public:
  LAMINA_HOST_DEVICE serial_team(std::size_t index, std::size_t teams) : index_(index), teams_(teams) {}
  LAMINA_HOST_DEVICE std::size_t index() const { return index_; }
  LAMINA_HOST_DEVICE std::size_t teams() const { return teams_; }
  LAMINA_HOST_DEVICE unsigned thread() const { return 0; }
  LAMINA_HOST_DEVICE unsigned threads() const { return 1; }
  LAMINA_HOST_DEVICE unsigned groups() const { return 1; }
  LAMINA_HOST_DEVICE serial_group group() const { return serial_group(0); }
  LAMINA_HOST_DEVICE void barrier() const {}
  LAMINA_HOST_DEVICE void wait_for_launches() const {}
  /// Says that the thread will read what is there.
  LAMINA_HOST_DEVICE void prefetch(const void*) const {}

  /// Called by all of the team, with what each thread has: afterwards each has all of them combined. In whatever order, which
  /// does not matter to integers. What the threads wrote before may be read afterwards.
  template <unsigned Count, class Combine>
  LAMINA_HOST_DEVICE void combine(unsigned long long (&)[Count], team_scratch<Count>&, const Combine&) const {
  }
  /// Called by all of the team: `own` becomes the sum of what the threads before have. Returns the sum of all. What the threads wrote
  /// before may be read afterwards.
  LAMINA_HOST_DEVICE unsigned long long sum_before(unsigned long long& own, team_scratch<1>&) const {
    const unsigned long long all = own;
    own = 0;
    return all;
  }
  /// Called by any thread, while others add to the same sum.
  LAMINA_HOST_DEVICE void add(shared_sum& sum, unsigned long long addend) const {
    const unsigned long long value = sum.value() + addend;
    sum = {static_cast<std::uint32_t>(value), static_cast<std::uint32_t>(value >> 32U)};
  }
  /// The same of a count of less than 2^32, which is given as it was before.
  LAMINA_HOST_DEVICE std::uint32_t count(std::uint32_t& counter) const { return counter++; }
  /// Called by all of the team: as arrives_last, for all of it.
  LAMINA_HOST_DEVICE bool is_last_to_arrive(std::uint32_t& counter, std::uint32_t count) const {
    return arrives_last(counter, count);
  }

 private:
  std::size_t index_;
  std::size_t teams_;
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
