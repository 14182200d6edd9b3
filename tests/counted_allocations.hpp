// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>

/// Counts every allocation of the program, and can refuse them. For one unit of a program: it defines operator new.
namespace lamina_test {

// Since the program began, and how many more are granted.
inline std::atomic<long> allocations{0};
inline std::atomic<std::size_t> allocated_bytes{0};
inline std::atomic<long> granted{std::numeric_limits<long>::max()};

inline void* allocate(std::size_t size, std::size_t alignment) {
  ++allocations;
  if (granted-- <= 0) throw std::bad_alloc();
  allocated_bytes += size;
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
inline void* allocate_quietly(std::size_t size, std::size_t alignment) noexcept {
  try {
    return allocate(size, alignment);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Through a pointer that the compiler cannot see through, so that it does not take free() for a mistake.
inline void (*volatile const release)(void*) = std::free;

template <class Call>
long allocations_of(Call&& call) {
  const long before = allocations;
  call();
  return allocations - before;
}
template <class Call>
std::size_t bytes_of(Call&& call) {
  const std::size_t before = allocated_bytes;
  call();
  return allocated_bytes - before;
}

}  // namespace lamina_test

void* operator new(std::size_t bytes) {
  return lamina_test::allocate(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return lamina_test::allocate(bytes, static_cast<std::size_t>(alignment));
}
// These would call the ones above, but a sanitizer brings its own.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return lamina_test::allocate_quietly(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return lamina_test::allocate_quietly(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept {
  lamina_test::release(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  lamina_test::release(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  lamina_test::release(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  lamina_test::release(memory);
}
