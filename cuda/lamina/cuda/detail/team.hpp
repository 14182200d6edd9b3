// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"

/// A kernel is written once, for a team of threads: `kernel(team, shared)` with team.thread() in [0, team.threads()),
/// team.index() among the teams of the launch, and team.barrier(). On a GPU a team is a thread block; where Thrust runs on
/// a CPU it is the single thread below. Loops go from thread() in strides of threads(), so that both do all of the work.
///
/// A kernel is a type with
///
///     static constexpr unsigned threads;        of a team, where there are many
///     static constexpr unsigned teams_at_once;  at least, on a multiprocessor of a GPU: limits registers
///     struct shared_memory;                     a team's own
///     std::size_t teams() const;
///     template <class Team> void operator()(const Team&, shared_memory&) const;
namespace lamina::inline LAMINA_ABI::cuda::detail {

class serial_team {
 public:
  LAMINA_HOST_DEVICE explicit serial_team(std::size_t index) : index_(index) {}
  LAMINA_HOST_DEVICE std::size_t index() const { return index_; }
  LAMINA_HOST_DEVICE unsigned thread() const { return 0; }
  LAMINA_HOST_DEVICE unsigned threads() const { return 1; }
  LAMINA_HOST_DEVICE void barrier() const {}
  /// Of the team's shared memory.
  LAMINA_HOST_DEVICE void add(unsigned long long& to, unsigned long long value) const { to += value; }
  LAMINA_HOST_DEVICE void lower(unsigned long long& to, unsigned long long value) const {
    if (value < to) to = value;
  }

 private:
  std::size_t index_;
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
