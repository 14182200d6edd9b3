// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Combines the totals of blocks in the order of reduction.hpp, without a launch of its own: the group that completes a run
/// of 64 combines it, whichever that is, and goes on with the run of runs that this one belongs to. So the last block of a layer
/// waits for one run a level, however large the layer is.
template <class F>
struct run_totals {
  F functor;
  double* totals;           // of the blocks of all layers
  std::uint32_t* arrivals;  // as many

  /// Called by all of a group with the total of block `index` of `count` of the layer whose blocks begin at `first`. Whether it
  /// completes the layer; then `total` is that of the layer. `total` counts in thread 0 alone.
  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE bool complete(const Group& group, std::size_t first, std::size_t count,
                                   std::size_t index, double& total) const {
    constexpr auto each = static_cast<unsigned>(totals_per_run) / Group::threads;
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
        if (group.thread() == 0) of_layer[head + index % totals_per_run * distance] = total;
        if (!group.is_last_to_arrive(arrivals[first + head + level], length)) return false;
        double own[each];
        for (unsigned k = 0; k < each; ++k) {
          const unsigned place = k * Group::threads + group.thread();
          own[k] = place < length ? of_layer[head + place * distance] : 0.0;
        }
        total = 0;
        for (unsigned k = 0; k < each; ++k) {
          for (unsigned thread = 0; thread < Group::threads; ++thread) {
            const double next = group.from(own[k], thread);
            if (k * Group::threads + thread < length) total = functor.combine(total, next);
          }
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
