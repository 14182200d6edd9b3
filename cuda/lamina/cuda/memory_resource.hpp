// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <new>
#include <stdexcept>
#include <string>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

/// Where all device memory of a compressor is to lie, in place of cudaMalloc: a pool such as RMM's, cudaMallocAsync, a
/// framework's caching allocator. It must outlive what was made with it. It is asked while a compressor is made, and by no step.
///
/// Memory is freed when the compressor goes. cudaFree then waits for the device; where a resource does not, wait for the
/// execution before the compressor goes.
class memory_resource {
 public:
  virtual ~memory_resource() = default;

  /// Memory of the current device of `bytes` bytes, more than 0, that begins at a multiple of 16 or more and can be used on every
  /// stream from now on: one that allocates in the order of a stream waits for it. What is in it does not matter. Throws, mostly
  /// std::bad_alloc, if there is none; the null pointer counts as that.
  [[nodiscard]] virtual void* allocate(std::size_t bytes) = 0;
  /// Takes back what allocate() gave for the same `bytes`.
  virtual void deallocate(void* memory, std::size_t bytes) noexcept = 0;

 protected:
  memory_resource() = default;
  memory_resource(const memory_resource&) = default;
  memory_resource& operator=(const memory_resource&) = default;
};

/// There is not enough device memory; what() says for what, and how many bytes were asked for.
class out_of_memory : public std::bad_alloc {
 public:
  explicit out_of_memory(const std::string& sentence) : sentence_(sentence) {}
  const char* what() const noexcept override { return sentence_.what(); }

 private:
  std::runtime_error sentence_;  // whose copies do not throw
};

}  // namespace lamina::inline LAMINA_ABI::cuda
