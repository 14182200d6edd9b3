// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"

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

/// Elements of all layers, zero at first, in one flat buffer.
///
/// A layer that is cleared is not written, nor is one that is new: the next gradient goes over what is there, in the threads that will
/// use it, whose memory it then is. Zeros are written when a layer is read before, once, whichever thread reads first: const members may
/// be called from several threads at a time.
template <element T>
class residual_memory {
 public:
  /// With `is_used` false: of no elements.
  residual_memory(const layout& model, bool is_used, std::pmr::memory_resource* memory)
      : model_(model), all_(is_used ? model.elements() : 0, memory), holds_(is_used ? model.layers() : 0) {}

  /// Element `begin` of a layer, to write; it and those behind it are anything where the layer is clear.
  T* at(std::size_t layer, std::size_t begin) noexcept { return all_.data() + model_.offset(layer) + begin; }
  std::size_t size() const noexcept { return all_.size(); }
  bool is_clear(std::size_t layer) const noexcept {
    return holds_[layer].load(std::memory_order_relaxed) != content::numbers;
  }
  /// All elements of the layer were written.
  void set_written(std::size_t layer) noexcept {
    holds_[layer].store(content::numbers, std::memory_order_relaxed);
  }

  void clear(std::size_t layer, std::size_t begin, std::size_t end) {
    if (begin == 0 && end == model_.sizes()[layer]) {
      holds_[layer].store(content::anything, std::memory_order_relaxed);
    } else if (!is_clear(layer)) {
      std::fill_n(at(layer, begin), end - begin, T(0));
    }
  }

  /// One layer, its zeros written.
  std::span<T> read(std::size_t layer) const {
    const std::span<T> elements(all_.data() + model_.offset(layer), model_.sizes()[layer]);
    content holds = holds_[layer].load(std::memory_order_acquire);
    if (holds == content::anything && holds_[layer].compare_exchange_strong(holds, content::becomes_zeros)) {
      std::fill(elements.begin(), elements.end(), T(0));
      holds_[layer].store(content::zeros, std::memory_order_release);
      holds_[layer].notify_all();
    } else if (holds == content::becomes_zeros) {
      holds_[layer].wait(content::becomes_zeros, std::memory_order_acquire);
    }
    return elements;
  }
  std::span<const T> read() const {
    for (std::size_t layer = 0; layer < holds_.size(); ++layer) read(layer);
    return {all_.data(), all_.size()};
  }
  void write(std::span<const T> saved) {
    std::copy(saved.begin(), saved.end(), all_.begin());
    for (std::size_t layer = 0; layer < holds_.size(); ++layer) set_written(layer);
  }

 private:
  /// What the memory of a layer holds.
  enum class content : std::uint8_t {
    anything,  // and counts as zero
    becomes_zeros,
    zeros,
    numbers,
  };

  layout model_;
  mutable buffer<T> all_;
  mutable std::vector<std::atomic<content>> holds_;
};

}  // namespace lamina::inline LAMINA_ABI::detail
