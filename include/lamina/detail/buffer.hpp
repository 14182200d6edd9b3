// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// An array that is not initialised: a page of it is touched first by the thread that first writes to it, and lies in that
/// thread's part of the memory. Begins at a cache line, so that blocks do not share lines and registers load aligned.
///
/// Its elements are anything until they are written. A contiguous range.
template <class T>
class buffer {
  // Their lifetime then begins and ends with the memory's.
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  static constexpr std::size_t alignment_bytes = alignof(T) > 64 ? alignof(T) : 64;

  buffer() noexcept = default;
  /// `count` elements, from operator new unless there is a resource, which must outlive the buffer and its copies. Throws
  /// std::length_error for more bytes than there are addresses, std::bad_alloc, or what the resource throws.
  explicit buffer(std::size_t count, std::pmr::memory_resource* resource = nullptr)
      : size_(count), resource_(resource != nullptr ? resource : std::pmr::new_delete_resource()) {
    data_ = allocate(count, *resource_);
  }

  /// Copies the elements, into memory of the same resource.
  buffer(const buffer& other) : buffer(other.size_, other.resource_) {
    if (size_ > 0) std::memcpy(static_cast<void*>(data_), other.data_, size_ * sizeof(T));
  }
  buffer(buffer&& other) noexcept { swap(other); }
  buffer& operator=(const buffer& other) {
    buffer copy(other);
    swap(copy);
    return *this;
  }
  buffer& operator=(buffer&& other) noexcept {
    buffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~buffer() {
    if (data_ != nullptr) resource_->deallocate(data_, size_ * sizeof(T), alignment_bytes);
  }

  void swap(buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(resource_, other.resource_);
  }

  [[nodiscard]] T* data() noexcept { return data_; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] T& operator[](std::size_t index) noexcept { return data_[index]; }
  [[nodiscard]] const T& operator[](std::size_t index) const noexcept { return data_[index]; }
  [[nodiscard]] T* begin() noexcept { return data_; }
  [[nodiscard]] const T* begin() const noexcept { return data_; }
  [[nodiscard]] T* end() noexcept { return data_ + size_; }
  [[nodiscard]] const T* end() const noexcept { return data_ + size_; }
  /// Where its memory comes from.
  [[nodiscard]] std::pmr::memory_resource* resource() const noexcept { return resource_; }

 private:
  static T* allocate(std::size_t count, std::pmr::memory_resource& resource) {
    if (count == 0) return nullptr;
    if (count > static_cast<std::size_t>(PTRDIFF_MAX) / sizeof(T)) {
      detail::raise(std::length_error("no memory has room for " + std::to_string(count) + " elements"));
    }
    return static_cast<T*>(resource.allocate(count * sizeof(T), alignment_bytes));
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
  std::pmr::memory_resource* resource_ = std::pmr::new_delete_resource();
};

}  // namespace lamina::inline LAMINA_ABI::detail
