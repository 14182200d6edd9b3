// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>

#include <cstddef>
#include <type_traits>

#include "lamina/cuda/detail/memory.hpp"
#include "lamina/cuda/detail/thread_block.hpp"
#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

namespace detail {

template <class Kernel>
struct run_serially {
  Kernel kernel;
  std::size_t thread_blocks;
  LAMINA_HOST_DEVICE void operator()(std::size_t index) const {
    typename Kernel::shared_memory shared;
    kernel(serial_thread_block{index, thread_blocks}, shared);
  }
};

}  // namespace detail

/// Runs the kernels through Thrust with a policy: thrust::omp::par, thrust::cpp::par and so on. For a GPU use on_stream of lamina.cuh.
template <class Policy>
class with_policy {
 public:
  explicit with_policy(Policy policy) : policy_(policy) {}

  template <class Kernel>
  void run(const Kernel& kernel) const {
    static_assert(std::is_trivially_copyable_v<Kernel>);
    const std::size_t thread_blocks = kernel.thread_blocks(detail::serial_group::threads);
    thrust::for_each_n(policy_, thrust::counting_iterator<std::size_t>(0), thread_blocks,
                       detail::run_serially<Kernel>{kernel, thread_blocks});
  }
  /// Thrust's algorithms return when they are done, except with par_nosync, which is not for here.
  void wait() const {}
  void require_device_memory(const void*, const char*) const {}
  void require_writable(const void*, std::size_t, const char*) const {}
  void require_no_capture(const char*) const {}
  void require_current_device() const {}

 private:
  Policy policy_;
};

}  // namespace lamina::inline LAMINA_ABI::cuda
