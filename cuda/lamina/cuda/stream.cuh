// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "lamina/cuda/error.hpp"
#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

namespace detail {

/// A team that is a thread block.
class thread_block {
 public:
  __device__ std::size_t index() const { return blockIdx.x; }
  __device__ unsigned thread() const { return threadIdx.x; }
  __device__ unsigned threads() const { return blockDim.x; }
  __device__ void barrier() const { __syncthreads(); }
  __device__ void add(unsigned long long& to, unsigned long long value) const { atomicAdd(&to, value); }
  __device__ void lower(unsigned long long& to, unsigned long long value) const { atomicMin(&to, value); }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads, Kernel::teams_at_once)
    run_thread_block(const __grid_constant__ Kernel kernel) {
  __shared__ typename Kernel::shared_memory shared;
  kernel(thread_block(), shared);
}

}  // namespace detail

/// Runs the kernels on a stream of the current device, one launch each: nothing is allocated, nothing waits for the
/// host, and all of it can be captured into a graph.
class on_stream {
 public:
  /// 0: the default stream. Throws cuda_error if there is no device.
  explicit on_stream(cudaStream_t stream = nullptr) : stream_(stream) { check(cudaGetDevice(&device_)); }

  /// Throws cuda_error if the launch fails, std::logic_error if another device is current than when this was made.
  template <class Kernel>
  void run(const Kernel& kernel) const {
    static_assert(std::is_trivially_copyable_v<Kernel>);
    const std::size_t teams = kernel.teams();
    if (teams == 0) return;
    if (teams > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
      throw std::invalid_argument("the model has more blocks than a launch can have");
    }
    int current = 0;
    check(cudaGetDevice(&current));
    if (current != device_) {
      throw std::logic_error("this execution was made for device " + std::to_string(device_) +
                             ", current is device " + std::to_string(current) +
                             ": call cudaSetDevice before");
    }
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(teams);
    config.blockDim = Kernel::threads;
    config.stream = stream_;
    // Gives the error of this launch and not, as cudaGetLastError, one that was left by somebody else.
    check(cudaLaunchKernelEx(&config, detail::run_thread_block<Kernel>, kernel));
  }

  /// Until all that was launched is done. Throws cuda_error if some of it failed.
  void wait() const { check(cudaStreamSynchronize(stream_)); }
  cudaStream_t stream() const noexcept { return stream_; }
  int device() const noexcept { return device_; }

  /// Throws std::invalid_argument, naming `what`, unless `pointer` is memory of this device, or managed.
  void require_device_memory(const void* pointer, const char* what) const {
    const cudaPointerAttributes attributes = attributes_of(pointer);
    if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
      throw std::invalid_argument(std::string(what) +
                                  ": a pointer to host memory where the device's is wanted");
    }
    if (attributes.type == cudaMemoryTypeDevice && attributes.device != device_) {
      throw std::invalid_argument(std::string(what) + ": memory of device " +
                                  std::to_string(attributes.device) + ", where that of device " +
                                  std::to_string(device_) + " is wanted");
    }
  }
  /// The same of `bytes` bytes, and host memory that the device can write under the same address: cudaMallocHost.
  void require_writable(const void* begin, std::size_t bytes, const char* what) const {
    for (const void* each :
         {begin, static_cast<const void*>(static_cast<const std::byte*>(begin) + bytes - 1)}) {
      const cudaPointerAttributes attributes = attributes_of(each);
      if (attributes.type == cudaMemoryTypeHost && attributes.devicePointer == each) continue;
      require_device_memory(each, what);
    }
  }

 private:
  static cudaPointerAttributes attributes_of(const void* pointer) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, pointer));
    return attributes;
  }

  cudaStream_t stream_;
  int device_ = 0;
};

}  // namespace lamina::inline LAMINA_ABI::cuda
