// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <memory_resource>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// Leaves elements that are given no value uninitialised, and lets memory begin at a cache line.
template <class T>
class uninitialized_allocator {
 public:
  using value_type = T;
  using propagate_on_container_copy_assignment = std::true_type;
  using propagate_on_container_move_assignment = std::true_type;
  using propagate_on_container_swap = std::true_type;
  static constexpr std::size_t alignment_bytes = alignof(T) > 64 ? alignof(T) : 64;

  uninitialized_allocator(std::pmr::memory_resource* resource = nullptr) noexcept
      : resource_(resource != nullptr ? resource : std::pmr::new_delete_resource()) {}

  template <class U>
  uninitialized_allocator(const uninitialized_allocator<U>& other) noexcept : resource_(other.resource()) {}
  std::pmr::memory_resource* resource() const noexcept { return resource_; }

  T* allocate(std::size_t count) {
    return static_cast<T*>(resource_->allocate(count * sizeof(T), alignment_bytes));
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    resource_->deallocate(memory, count * sizeof(T), alignment_bytes);
  }
  template <class... From>
  void construct(T* element, From&&... from) noexcept {
    if constexpr (sizeof...(From) > 0) ::new (static_cast<void*>(element)) T(std::forward<From>(from)...);
  }
  bool operator==(const uninitialized_allocator&) const = default;

 private:
  std::pmr::memory_resource* resource_;
};

/// A page of it is touched first by the thread that first writes to it, and lies in that thread's part of the memory. Blocks do not share
/// cache lines, and registers load aligned. Made of a number of elements, and a resource that outlives it and its copies, or nullptr for
/// operator new. Throws std::length_error for more bytes than there are addresses, std::bad_alloc, or what the resource throws.
template <class T>
requires std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>
using buffer = std::vector<T, uninitialized_allocator<T>>;

}  // namespace lamina::inline LAMINA_ABI::detail
