// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/detail/abi.hpp"

/// A kernel is written once, for a thread block: one of a GPU, or the single thread below where Thrust runs on a CPU. Its groups take
/// a block of 4,096 elements each: on a GPU 16 threads with four of the 64 lanes of representative.hpp, on a CPU one thread with all of them.
///
///     static constexpr unsigned threads;                of a thread block on a GPU
///     static constexpr unsigned thread_blocks_at_once;  at least, on a multiprocessor of a GPU: limits registers
///     struct shared_memory;
///     std::size_t thread_blocks(unsigned groups) const; that have work, where one has so many groups
///     template <class ThreadBlock> void operator()(const ThreadBlock&, shared_memory&) const;
///
/// It calls wait_for_launches() before it touches what an earlier launch writes. No thread block of a launch waits for another.
namespace lamina::inline LAMINA_ABI::cuda::detail {

inline constexpr unsigned most_threads = 1024;  // of a thread block

/// How many thread blocks share `units` of work, a unit for each of their groups.
constexpr std::size_t thread_blocks_for(std::size_t units, unsigned groups) {
  return (units + groups - 1) / groups;
}

/// Shared memory for `Count` numbers of each thread.
template <unsigned Count>
struct block_scratch {
  unsigned long long of_warp[Count][most_threads / 32];
};

/// A sum that threads add to at the same time, in two words: GPUs add words of 32 bits in shared memory at once, those of 64 in a loop.
struct shared_sum {
  std::uint32_t low;
  std::uint32_t high;

  LAMINA_HOST_DEVICE unsigned long long value() const {
    return (static_cast<unsigned long long>(high) << 32U) + low;
  }
};

LAMINA_HOST_DEVICE constexpr unsigned long long lesser(unsigned long long a, unsigned long long b) {
  return b < a ? b : a;
}

/// Whether this is the last of `count` arrivals at `counter`, 0 before and after. What the others wrote before may be read then.
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
struct serial_group {
  static constexpr unsigned threads = 1;
  unsigned own_index;  // among the groups of its thread block

  LAMINA_HOST_DEVICE unsigned index() const { return own_index; }
  LAMINA_HOST_DEVICE unsigned thread() const { return 0; }
  LAMINA_HOST_DEVICE void barrier() const {}
  /// What the thread has whose number differs in the bit `distance`.
  template <class X>
  LAMINA_HOST_DEVICE X across(X own, unsigned) const {
    return own;
  }
  template <class X>
  LAMINA_HOST_DEVICE X from(X own, unsigned) const {
    return own;
  }
  /// Called by all of the group: as arrives_last, for all of it.
  LAMINA_HOST_DEVICE bool is_last_to_arrive(std::uint32_t& counter, std::uint32_t count) const {
    return arrives_last(counter, count);
  }
};

struct serial_thread_block {
  std::size_t own_index;
  std::size_t size_of_grid;  // thread blocks of the launch

  LAMINA_HOST_DEVICE std::size_t index() const { return own_index; }
  LAMINA_HOST_DEVICE std::size_t grid() const { return size_of_grid; }
  LAMINA_HOST_DEVICE unsigned thread() const { return 0; }
  LAMINA_HOST_DEVICE unsigned threads() const { return 1; }
  LAMINA_HOST_DEVICE unsigned groups() const { return 1; }
  LAMINA_HOST_DEVICE serial_group group() const { return {0}; }
  LAMINA_HOST_DEVICE void barrier() const {}
  LAMINA_HOST_DEVICE void wait_for_launches() const {}
  LAMINA_HOST_DEVICE void prefetch(const void*) const {}

  /// Called by all threads, each with its numbers: afterwards each has the least of all threads. As a barrier.
  template <unsigned Count>
  LAMINA_HOST_DEVICE void least(unsigned long long (&)[Count], block_scratch<Count>&) const {}
  /// The same: `own` becomes the sum of what the threads before have. Returns the sum of all threads.
  LAMINA_HOST_DEVICE unsigned long long sum_before(unsigned long long& own, block_scratch<1>&) const {
    const unsigned long long all = own;
    own = 0;
    return all;
  }
  /// Called by any thread, while others add to the same sum.
  LAMINA_HOST_DEVICE void add(shared_sum& sum, unsigned long long addend) const {
    const unsigned long long value = sum.value() + addend;
    sum = {static_cast<std::uint32_t>(value), static_cast<std::uint32_t>(value >> 32U)};
  }
  /// The same of a count of less than 2^32. Returns it as it was before.
  LAMINA_HOST_DEVICE std::uint32_t count(std::uint32_t& counter) const { return counter++; }
  LAMINA_HOST_DEVICE bool is_last_to_arrive(std::uint32_t& counter, std::uint32_t count) const {
    return arrives_last(counter, count);
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
