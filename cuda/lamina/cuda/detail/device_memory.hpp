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
#include <memory>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
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

/// Gives device memory back. After an error that spoiled the context, or once CUDA has shut down, it cannot be freed, and Thrust throws:
/// in a destructor that would end the program, mostly while the error itself is on its way to the caller.
struct device_deleter {
  std::pmr::memory_resource* resource;  // none: thrust::device_malloc, which is cudaMalloc
  std::size_t bytes;

  static constexpr std::size_t alignment_bytes = 16;  // what kernels load at once

  void operator()(void* memory) const noexcept {
    if (resource != nullptr) return resource->deallocate(memory, bytes, alignment_bytes);
    try {
      thrust::device_free(thrust::device_ptr<void>(memory));
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the next call of CUDA tells it
    }
  }
};

/// Arrays in device memory, from a resource unless that is null, which live as long as this. `what` is what an array is for, in
/// errors. Throws out_of_memory, and what the resource throws that is no std::bad_alloc.
class device_memory {
 public:
  explicit device_memory(std::pmr::memory_resource* resource) : resource_(resource) {}

  /// Null for no elements.
  template <class X>
  X* filled(std::size_t count, const X& value, const char* what) {
    static_assert(std::is_trivially_copyable_v<X>);
    if (count == 0) return nullptr;
    X* const array = static_cast<X*>(allocate(count * sizeof(X), what));
    thrust::fill_n(thrust::device_ptr<X>(array), count, value);
    return array;
  }
  template <class X>
  X* copy_of(const std::vector<X>& host, const char* what) {
    X* const array = filled(host.size(), X(), what);
    thrust::copy(host.begin(), host.end(), thrust::device_ptr<X>(array));
    return array;
  }

 private:
  void* allocate(std::size_t bytes, const char* what) {
    constexpr std::size_t alignment = device_deleter::alignment_bytes;
    try {
      void* const memory =
          resource_ != nullptr ? resource_->allocate(bytes, alignment) : thrust::device_malloc(bytes).get();
      arrays_.emplace_back(memory, device_deleter{resource_, bytes});
      if (reinterpret_cast<std::uintptr_t>(memory) % alignment == 0) return memory;
    } catch (const std::bad_alloc& error) {
      throw out_of_memory(std::string("no device memory for ") + what + ", " + std::to_string(bytes) +
                          " bytes: " + error.what());
    }
    throw std::invalid_argument(std::string("the memory resource gave memory for ") + what +
                                " that does not begin at a multiple of 16 bytes");
  }

  std::pmr::memory_resource* resource_;
  std::vector<std::unique_ptr<void, device_deleter>> arrays_;
};

template <class X>
std::vector<X> to_host(const X* from, std::size_t count) {
  std::vector<X> host(count);
  const thrust::device_ptr<const X> begin(from);
  thrust::copy(begin, begin + static_cast<std::ptrdiff_t>(count), host.begin());
  return host;
}
template <class X>
void to_device(const std::vector<X>& host, X* to) {
  thrust::copy(host.begin(), host.end(), thrust::device_ptr<X>(to));
}

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI::cuda
