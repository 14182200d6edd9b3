// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>

#include <cstddef>
#include <type_traits>

#include "lamina/cuda/detail/device_array.hpp"
#include "lamina/cuda/detail/team.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

namespace detail {

template <class Kernel>
struct run_serial_team {
  Kernel kernel;
  std::size_t teams;
  LAMINA_HOST_DEVICE void operator()(std::size_t index) const {
    typename Kernel::shared_memory shared;
    kernel(serial_team(index, teams), shared);
  }
};

}  // namespace detail

/// Runs the kernels through Thrust with an execution policy: thrust::device, thrust::omp::par, thrust::cpp::par and so on.
/// Each team is one call, so on a CPU this is a loop over blocks. For a GPU take on_stream of lamina.cuh, whose teams are
/// thread blocks.
template <class Policy>
class with_policy {
 public:
  explicit with_policy(Policy policy) : policy_(policy) {}

  template <class Kernel>
  void run(const Kernel& kernel) const {
    static_assert(std::is_trivially_copyable_v<Kernel>);
    const std::size_t teams = kernel.teams(detail::serial_group::threads);
    thrust::for_each_n(policy_, thrust::counting_iterator<std::size_t>(0), teams,
                       detail::run_serial_team<Kernel>{kernel, teams});
  }
  /// Thrust's algorithms return when they are done, except with par_nosync, which is not for here.
  void wait() const {}
  /// Whether memory is where it should be is known to on_stream alone.
  void require_device_memory(const void*, const char*) const {}
  void require_writable(const void*, std::size_t, const char*) const {}
  void require_no_capture(const char*) const {}
  void require_current_device() const {}

 private:
  Policy policy_;
};

}  // namespace lamina::inline LAMINA_ABI::cuda
