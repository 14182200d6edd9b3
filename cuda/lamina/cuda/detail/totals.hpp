// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Combines the totals of blocks in the order of reduction.hpp, without a launch of its own: the team that completes a run
/// of 64 combines it, whichever that is, and goes on with the run of runs that this one belongs to. So the last block of a layer
/// waits for one run a level, however large the layer is.
template <class F>
struct run_totals {
  struct shared_memory {
    double total[totals_per_run];
  };

  F functor;
  double* totals;           // of the blocks of all layers
  std::uint32_t* arrivals;  // as many

  /// Called by all of a team with the total of block `index` of `count` of the layer whose blocks begin at `first`. Whether it
  /// completes the layer; then `total` is that of the layer. `total` counts in thread 0 alone.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE bool complete(const Team& team, shared_memory& shared, std::size_t first,
                                   std::size_t count, std::size_t index, double& total) const {
    double* const of_layer = totals + first;
    // The total of a run stands where its first did. Its counter does too, moved on by its level: only a run of one, which
    // needs no counter, has fewer than 64 blocks where a level lies below it.
    std::size_t distance = 1;
    for (unsigned level = 0;; ++level) {
      const std::size_t run = index / totals_per_run;
      const std::size_t head = run * totals_per_run * distance;
      const std::size_t rest = count - run * totals_per_run;
      const auto length = static_cast<unsigned>(rest < totals_per_run ? rest : totals_per_run);
      if (length == 1) {
        total = functor.combine(0.0, total);
      } else {
        if (team.thread() == 0) of_layer[head + index % totals_per_run * distance] = total;
        if (!team.is_last_to_arrive(arrivals[first + head + level], length)) return false;
        for (unsigned k = team.thread(); k < length; k += team.threads())
          shared.total[k] = of_layer[head + k * distance];
        team.barrier();
        if (team.thread() == 0) {
          total = 0;
          for (unsigned k = 0; k < length; ++k) total = functor.combine(total, shared.total[k]);
        }
      }
      if (count <= totals_per_run) return true;
      count = (count + totals_per_run - 1) / totals_per_run;
      index = run;
      distance *= totals_per_run;
    }
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
