// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <source_location>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "lamina/cuda/detail/thread_block.hpp"
#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

/// A call of CUDA failed: what() names the error and the line of the call.
class cuda_error : public std::runtime_error {
 public:
  cuda_error(cudaError_t code, const std::source_location& place)
      : std::runtime_error(std::string(cudaGetErrorName(code)) + ": " + cudaGetErrorString(code) + ", at " +
                           place.file_name() + ":" + std::to_string(place.line())) {}
};

/// Throws cuda_error, with the place of this call, unless `code` is cudaSuccess.
inline void check_error(cudaError_t code,
                        const std::source_location& place = std::source_location::current()) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // or the next check would find it again
  throw cuda_error(code, place);
}

namespace detail {

/// 16 threads of a warp, which have four lanes of a block each.
class half_warp {
 public:
  static constexpr unsigned threads = 16;

  __device__ unsigned index() const { return threadIdx.x / threads; }
  __device__ unsigned thread() const { return threadIdx.x % threads; }
  __device__ void barrier() const { __syncwarp(mask()); }
  template <class X>
  __device__ X across(X own, unsigned distance) const {
    return __shfl_xor_sync(mask(), own, distance, threads);
  }
  template <class X>
  __device__ X from(X own, unsigned thread) const {
    return __shfl_sync(mask(), own, thread, threads);
  }
  __device__ bool is_last_to_arrive(std::uint32_t& counter, std::uint32_t count) const {
    const bool is_last = from(thread() == 0 && arrives_last(counter, count) ? 1 : 0, 0) != 0;
    barrier();  // what the first thread acquired, all may read
    return is_last;
  }

 private:
  __device__ static unsigned mask() { return 0xffffU << (threadIdx.x & threads); }
};

class device_thread_block {
 public:
  __device__ std::size_t index() const { return blockIdx.x; }
  __device__ std::size_t grid() const { return gridDim.x; }
  __device__ unsigned thread() const { return threadIdx.x; }
  __device__ unsigned threads() const { return blockDim.x; }
  __device__ unsigned groups() const { return blockDim.x / half_warp::threads; }
  __device__ half_warp group() const { return {}; }
  __device__ void barrier() const { __syncthreads(); }
  /// All that was launched before is done and can be read. From here on the next launch may begin, and waits here.
  __device__ void wait_for_launches() const {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
#endif
  }
  template <unsigned Count>
  __device__ void least(unsigned long long (&values)[Count], block_scratch<Count>& scratch) const {
    for (unsigned k = 0; k < Count; ++k) {
      const unsigned long long of_warp = least_of_warp(values[k]);
      if (lane() == 0) scratch.of_warp[k][warp()] = of_warp;
    }
    __syncthreads();
    // A lane without a warp of its own takes the first's number, which changes nothing.
    for (unsigned k = 0; k < Count; ++k)
      values[k] = least_of_warp(scratch.of_warp[k][lane() < threads() / lanes_of_warp ? lane() : 0]);
    __syncthreads();
  }

  __device__ unsigned long long sum_before(unsigned long long& own, block_scratch<1>& scratch) const {
    const unsigned long long sum = sum_up_to(own);
    if (lane() == lanes_of_warp - 1) scratch.of_warp[0][warp()] = sum;
    __syncthreads();
    // Each warp adds up the warps' sums, a lane each.
    const unsigned long long up_to =
        sum_up_to(lane() < threads() / lanes_of_warp ? scratch.of_warp[0][lane()] : 0);
    const unsigned long long before = __shfl_sync(all_lanes, up_to, warp() == 0 ? 0 : warp() - 1);
    own = sum - own + (warp() == 0 ? 0 : before);
    __syncthreads();
    return __shfl_sync(all_lanes, up_to, lanes_of_warp - 1);
  }
  __device__ void add(shared_sum& sum, unsigned long long addend) const {
    const auto low = static_cast<std::uint32_t>(addend);
    const std::uint32_t before = atomicAdd(&sum.low, low);
    const auto high = static_cast<std::uint32_t>(addend >> 32U) + (before + low < before ? 1U : 0U);
    if (high != 0) atomicAdd(&sum.high, high);
  }
  __device__ void prefetch(const void* address) const {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
  }
  __device__ std::uint32_t count(std::uint32_t& counter) const {
    return atomicAdd(&counter, 1U);
  }

  __device__ bool is_last_to_arrive(std::uint32_t& counter, std::uint32_t count) const {
    __syncthreads();
    return __syncthreads_or(threadIdx.x == 0 && arrives_last(counter, count)) != 0;
  }

 private:
  static constexpr unsigned lanes_of_warp = 32;
  static constexpr unsigned all_lanes = 0xffffffffU;

  __device__ static unsigned lane() {
    return threadIdx.x % lanes_of_warp;
  }
  __device__ static unsigned warp() {
    return threadIdx.x / lanes_of_warp;
  }

  __device__ static unsigned long long least_of_warp(unsigned long long value) {
    for (unsigned distance = lanes_of_warp / 2; distance > 0; distance /= 2)
      value = lesser(value, __shfl_xor_sync(all_lanes, value, distance));
    return value;
  }
  // Of the warp's lanes up to this one.
  __device__ static unsigned long long sum_up_to(unsigned long long value) {
    for (unsigned distance = 1; distance < lanes_of_warp; distance *= 2) {
      const unsigned long long other = __shfl_up_sync(all_lanes, value, distance);
      if (lane() >= distance) value += other;
    }
    return value;
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads, Kernel::thread_blocks_at_once)
    run_thread_block(const __grid_constant__ Kernel kernel) {
  static_assert(Kernel::threads % 32 == 0 && Kernel::threads <= most_threads);
  __shared__ typename Kernel::shared_memory shared;
  kernel(device_thread_block(), shared);
}

/// Whether a kernel itself waits for what was launched before, so that it may begin early: the PTX of sm_80 runs on later devices, too.
template <class Kernel>
bool may_begin_early(int device) {
  static std::mutex mutex;
  static std::map<int, bool> known;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(device); found != known.end()) return found->second;
  cudaFuncAttributes attributes{};
  check_error(cudaFuncGetAttributes(&attributes, run_thread_block<Kernel>));
  return known.emplace(device, attributes.ptxVersion >= 90).first->second;
}

}  // namespace detail

/// Runs the kernels on a stream of the current device, one launch each.
class on_stream {
 public:
  /// 0: the default stream. Throws cuda_error if there is no device.
  explicit on_stream(cudaStream_t stream = nullptr) : stream_(stream) {
    check_error(cudaGetDevice(&device_));
  }

  template <class Kernel>
  void run(const Kernel& kernel) const {
    static_assert(std::is_trivially_copyable_v<Kernel>);
    require_current_device();
    const std::size_t thread_blocks = kernel.thread_blocks(Kernel::threads / detail::half_warp::threads);
    if (thread_blocks == 0) return;
    if (thread_blocks > static_cast<std::size_t>((std::numeric_limits<int>::max)()))
      throw std::invalid_argument("the model has more blocks than a launch can have");
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(thread_blocks);
    config.blockDim = Kernel::threads;
    config.stream = stream_;
    config.attrs = &early;
    config.numAttrs = detail::may_begin_early<Kernel>(device_) ? 1 : 0;
    check_error(cudaLaunchKernelEx(&config, detail::run_thread_block<Kernel>, kernel));
  }

  /// Throws std::logic_error if another device is current than when this was made.
  void require_current_device() const {
    int current = 0;
    check_error(cudaGetDevice(&current));
    if (current == device_) return;
    throw std::logic_error("the execution is of device " + std::to_string(device_) + ", current is device " +
                           std::to_string(current) + ": call cudaSetDevice before");
  }
  void wait() const { check_error(cudaStreamSynchronize(stream_)); }

  /// Throws std::invalid_argument, naming `what`, unless `pointer` is memory of this device, or managed.
  void require_device_memory(const void* pointer, const char* what) const {
    const cudaPointerAttributes attributes = attributes_of(pointer);
    if (attributes.type == cudaMemoryTypeManaged) return;
    if (attributes.type != cudaMemoryTypeDevice)
      throw std::invalid_argument(std::string(what) + ": host memory where the device's is wanted");
    if (attributes.device == device_) return;
    throw std::invalid_argument(std::string(what) + ": memory of device " +
                                std::to_string(attributes.device) + " where that of device " +
                                std::to_string(device_) + " is wanted");
  }
  /// The same of `bytes` bytes, and host memory that the device can write under the same address: cudaMallocHost.
  void require_writable(const void* begin, std::size_t bytes, const char* what) const {
    const void* const last = static_cast<const std::byte*>(begin) + bytes - 1;
    for (const void* each : {begin, last}) {
      const cudaPointerAttributes attributes = attributes_of(each);
      if (attributes.type == cudaMemoryTypeHost && attributes.devicePointer == each) continue;
      require_device_memory(each, what);
    }
  }

  /// Throws std::logic_error, naming `call`, while the stream is captured into a graph, and leaves the capture as it is.
  void require_no_capture(const char* call) const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_error(cudaStreamIsCapturing(stream_, &status));
    if (status != cudaStreamCaptureStatusNone)
      throw std::logic_error(std::string(call) + ": the stream is captured into a graph; call it before");
  }

 private:
  static cudaPointerAttributes attributes_of(const void* pointer) {
    cudaPointerAttributes found{};
    check_error(cudaPointerGetAttributes(&found, pointer));
    return found;
  }

  cudaStream_t stream_;
  int device_ = 0;
};

}  // namespace lamina::inline LAMINA_ABI::cuda
