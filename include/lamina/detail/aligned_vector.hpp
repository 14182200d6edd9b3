// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// Memory that begins at a cache line, so that blocks do not share lines and registers load aligned.
template <class T>
struct cache_line_allocator {
  using value_type = T;
  static constexpr std::align_val_t alignment{64};

  cache_line_allocator() = default;
  template <class U>
  cache_line_allocator(const cache_line_allocator<U>&) noexcept {}

  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), alignment)); }
  void deallocate(T* memory, std::size_t) noexcept { ::operator delete(memory, alignment); }
  bool operator==(const cache_line_allocator&) const = default;
};

template <class T>
using aligned_vector = std::vector<T, cache_line_allocator<T>>;

}  // namespace lamina::inline LAMINA_ABI::detail
