// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>
#include <thrust/device_free.h>
#include <thrust/device_malloc.h>
#include <thrust/device_ptr.h>
#include <thrust/fill.h>
#include <thrust/version.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

/// Thrust where it is: programs that share a process with another Thrust put theirs into a namespace of its own by
/// THRUST_CUB_WRAPPED_NAMESPACE.
namespace thrust = THRUST_NS_QUALIFIER;

/// There is not enough device memory; what() says for what, and how many bytes were asked for.
class out_of_memory : public std::bad_alloc {
 public:
  explicit out_of_memory(const std::string& sentence) : sentence_(sentence) {}
  const char* what() const noexcept override { return sentence_.what(); }

 private:
  std::runtime_error sentence_;  // whose copies do not throw
};

namespace detail {

/// What thrust::device_malloc gave. After an error that spoiled the context, or once CUDA has shut down, it cannot be freed, and
/// Thrust throws: in a destructor that would end the program, mostly while the error itself is on its way to the caller.
inline void free_device_memory(void* memory) noexcept {
  try {
    thrust::device_free(thrust::device_ptr<void>(memory));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the next call of CUDA tells it
  }
}

/// An array in device memory of a resource; where that is null, in what Thrust allocates, which is cudaMalloc's. What
/// thrust::device_vector is but for this: its assign() takes memory of an allocator that was never given. Moved, not copied.
template <class X>
class device_array {
  static_assert(std::is_trivially_copyable_v<X>);

 public:
  /// Without elements yet. `what` is what it is for, in errors.
  device_array(std::pmr::memory_resource* resource, const char* what) noexcept
      : resource_(resource), what_(what) {}
  device_array(device_array&& other) noexcept
      : resource_(other.resource_),
        what_(other.what_),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  device_array& operator=(device_array&& other) noexcept {
    device_array moved(std::move(other));
    std::swap(resource_, moved.resource_);
    std::swap(what_, moved.what_);
    std::swap(data_, moved.data_);
    std::swap(size_, moved.size_);
    return *this;
  }
  ~device_array() { release(); }

  /// `count` elements in new memory. Throws out_of_memory, and what the resource throws that is no std::bad_alloc.
  void assign(std::size_t count, const X& value) {
    release();
    if (count == 0) return;
    data_ = allocate(count * sizeof(X));
    size_ = count;
    thrust::fill(begin(), end(), value);
  }
  void resize(std::size_t count) { assign(count, X()); }
  device_array& operator=(const std::vector<X>& host) {
    resize(host.size());
    thrust::copy(host.begin(), host.end(), begin());
    return *this;
  }

  thrust::device_ptr<X> data() noexcept { return thrust::device_ptr<X>(data_); }
  thrust::device_ptr<const X> data() const noexcept { return thrust::device_ptr<const X>(data_); }
  thrust::device_ptr<X> begin() noexcept { return data(); }
  thrust::device_ptr<const X> begin() const noexcept { return data(); }
  thrust::device_ptr<X> end() noexcept { return data() + static_cast<std::ptrdiff_t>(size_); }
  thrust::device_ptr<const X> end() const noexcept { return data() + static_cast<std::ptrdiff_t>(size_); }
  decltype(auto) operator[](std::size_t index) { return data()[static_cast<std::ptrdiff_t>(index)]; }
  decltype(auto) operator[](std::size_t index) const { return data()[static_cast<std::ptrdiff_t>(index)]; }
  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }

 private:
  static constexpr std::size_t alignment_bytes = 16;  // what kernels load at once

  X* allocate(std::size_t bytes) {
    try {
      if (resource_ == nullptr) return static_cast<X*>(thrust::device_malloc(bytes).get());
      void* memory = resource_->allocate(bytes, alignment_bytes);
      if (reinterpret_cast<std::uintptr_t>(memory) % alignment_bytes != 0) {
        resource_->deallocate(memory, bytes, alignment_bytes);
        throw std::invalid_argument(std::string("the memory resource gave memory for ") + what_ +
                                    " that does not begin at a multiple of 16 bytes");
      }
      return static_cast<X*>(memory);
    } catch (const std::bad_alloc& error) {
      throw out_of_memory(std::string("no device memory for ") + what_ + ", " + std::to_string(bytes) +
                          " bytes: " + error.what());
    }
  }

  void release() noexcept {
    X* const memory = std::exchange(data_, nullptr);
    const std::size_t bytes = std::exchange(size_, 0) * sizeof(X);
    if (memory == nullptr) return;
    if (resource_ != nullptr) {
      resource_->deallocate(memory, bytes, alignment_bytes);
    } else {
      free_device_memory(memory);
    }
  }

  std::pmr::memory_resource* resource_;
  const char* what_;
  X* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI::cuda
