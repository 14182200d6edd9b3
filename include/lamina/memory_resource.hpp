// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI {

/// Where large buffers are to lie, in place of operator new: pinned memory that a device reads, memory that is registered
/// with a network card, huge pages, one node of a NUMA machine. It must outlive what was made with it.
///
/// lamina/adapt/pmr.hpp makes one of a std::pmr::memory_resource.
class memory_resource {
 public:
  virtual ~memory_resource() = default;

  /// Host memory of `bytes` bytes, more than 0, that begins at a multiple of `alignment`, a power of two in bytes. What is
  /// in it does not matter, and pages that nobody touched are best left so. Throws, mostly std::bad_alloc, if there is
  /// none; the null pointer counts as that.
  [[nodiscard]] virtual void* allocate(std::size_t bytes, std::size_t alignment) = 0;
  /// Takes back what allocate() gave for the same `bytes` and `alignment`.
  virtual void deallocate(void* memory, std::size_t bytes, std::size_t alignment) noexcept = 0;

 protected:
  memory_resource() = default;
  memory_resource(const memory_resource&) = default;
  memory_resource& operator=(const memory_resource&) = default;
};

}  // namespace lamina::inline LAMINA_ABI
