// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "launch/options.hpp"
#include "launch/topology.hpp"

namespace lab {

/// What MPI says of how this rank was started.
struct launch_info {
  int rank = 0;
  int ranks = 1;
  std::vector<int> machines = {0};  ///< of each rank, by the first rank on it

  std::size_t this_rank() const { return static_cast<std::size_t>(rank); }
};
launch_info find_launch_info();

/// Who is who, as the options want it among so many ranks. Throws std::invalid_argument for ranks too few or too many.
topology find_topology(const lab::options& options, const launch_info& here);

/// The workers on this machine, of ranks below `end`.
std::size_t workers_here(const topology& ranks, const launch_info& here, std::size_t end);
/// Of this rank: the machine's cores shared among its workers, unless the options say how many.
int thread_count(const lab::options& options, const topology& ranks, const launch_info& here);

/// Runs `prepare` on every rank. If it throws anywhere, the first rank that failed says why, and all get false: they can
/// then end in order instead of waiting for each other.
bool all_succeed(const launch_info& here, const std::function<void()>& prepare);
/// Ranks may be started with different command lines: if one has nothing to run, all end, and the first such says why.
std::optional<int> first_exit_code(const parsed& command, const launch_info& here);

}  // namespace lab
