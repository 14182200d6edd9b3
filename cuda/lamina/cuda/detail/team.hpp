// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"

/// A kernel is written once, for a team of threads: `kernel(team, shared)` with team.thread() in [0, team.threads()),
/// team.index() in [0, team.teams()) among the teams of the launch, and team.barrier(). On a GPU a team is a thread block;
/// where Thrust runs on a CPU it is the single thread below. Loops go from thread() in strides of threads(), so that both do
/// all of the work. Teams of a launch may run at the same time or one after the other, in any order: none waits for another.
///
/// A kernel is a type with
///
///     static constexpr unsigned threads;        of a team, where there are many
///     static constexpr unsigned teams_at_once;  at least, on a multiprocessor of a GPU: limits registers
///     static constexpr bool walks;              true, or none: teams go from index() in strides of teams() as well, so that
///                                               a launch has no more of them than run at once
///     struct shared_memory;                     a team's own
///     std::size_t teams() const;                that have work
///     template <class Team> void operator()(const Team&, shared_memory&) const;
namespace lamina::inline LAMINA_ABI::cuda::detail {

template <class Kernel>
concept walking_kernel = requires {
  requires Kernel::walks;
};

/// How many teams a launch has where `at_once` run at the same time.
template <class Kernel>
std::size_t teams_of(const Kernel& kernel, std::size_t at_once) {
  const std::size_t teams = kernel.teams();
  if constexpr (walking_kernel<Kernel>) {
    return teams < at_once ? teams : at_once;
  } else {
    return teams;
  }
}

inline constexpr unsigned most_threads = 1024;  // of a team

/// What a team exchanges numbers through, `Count` of each thread: shared memory of its own.
template <unsigned Count>
struct team_scratch {
  unsigned long long of_warp[Count][most_threads / 32];
  unsigned long long all;
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

class serial_team {
 public:
  LAMINA_HOST_DEVICE serial_team(std::size_t index, std::size_t teams) : index_(index), teams_(teams) {}
  LAMINA_HOST_DEVICE std::size_t index() const { return index_; }
  LAMINA_HOST_DEVICE std::size_t teams() const { return teams_; }
  LAMINA_HOST_DEVICE unsigned thread() const { return 0; }
  LAMINA_HOST_DEVICE unsigned threads() const { return 1; }
  LAMINA_HOST_DEVICE void barrier() const {}

  /// Called by all of the team, with what each thread has: afterwards each has all of them combined. In whatever order, which
  /// does not matter to integers. What the threads wrote before may be read afterwards.
  template <unsigned Count, class Combine>
  LAMINA_HOST_DEVICE void combine(unsigned long long (&)[Count], team_scratch<Count>&, const Combine&) const {
  }
  /// Called by all of the team: values[k] of thread t is the (k * threads() + t)-th of their numbers, and becomes the sum of
  /// those before it. Returns the sum of all. What the threads wrote before may be read afterwards.
  template <unsigned Count>
  LAMINA_HOST_DEVICE unsigned long long sum_before(unsigned long long (&values)[Count],
                                                   team_scratch<Count>&) const {
    unsigned long long sum = 0;
    for (unsigned long long& each : values) {
      const unsigned long long value = each;
      each = sum;
      sum += value;
    }
    return sum;
  }

  /// Copies 4, 8 or 16 bytes, aligned to as many, to the team's shared memory, at any time until the thread has waited for
  /// them: others may read them after the next barrier.
  template <unsigned Bytes>
  LAMINA_HOST_DEVICE void copy_ahead(void* to, const void* from) const {
    struct alignas(Bytes) bytes {
      std::uint32_t word[Bytes / 4];
    };
    *static_cast<bytes*>(to) = *static_cast<const bytes*>(from);
  }
  /// What the thread has begun to copy since the last end is a group, which may be empty.
  LAMINA_HOST_DEVICE void end_group() const {}
  /// Waits for all of the thread's groups but the last `Later`.
  template <unsigned Later>
  LAMINA_HOST_DEVICE void wait_for_copies() const {}

  /// Called by all of the team. Whether it is the last of `count` teams to arrive at `counter`, in device memory, which is 0
  /// before the first and after the last. What the others wrote before they arrived may be read then.
  LAMINA_HOST_DEVICE bool is_last_to_arrive(std::uint32_t& counter, std::uint32_t count) const {
#if defined(__CUDA_ARCH__)
    __threadfence();
    const bool is_last = atomicAdd(&counter, 1U) + 1 == count;
    __threadfence();
#else
    const bool is_last = __atomic_add_fetch(&counter, 1U, __ATOMIC_ACQ_REL) == count;
#endif
    if (is_last) counter = 0;
    return is_last;
  }

 private:
  std::size_t index_;
  std::size_t teams_;
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
