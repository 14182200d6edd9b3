// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <memory_resource>

#include "lamina/detail/abi.hpp"
#include "lamina/memory_resource.hpp"

namespace lamina::inline LAMINA_ABI {

/// A std::pmr::memory_resource as one of lamina: a pool, an arena, or what another library gives as such.
///
///     std::pmr::synchronized_pool_resource pool;
///     lamina::pmr_resource memory(pool);   // both outlive what is made with them
class pmr_resource final : public memory_resource {
 public:
  explicit pmr_resource(std::pmr::memory_resource& upstream) noexcept : upstream_(&upstream) {}

  [[nodiscard]] void* allocate(std::size_t bytes, std::size_t alignment) override {
    return upstream_->allocate(bytes, alignment);
  }
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment) noexcept override {
    upstream_->deallocate(memory, bytes, alignment);
  }

  [[nodiscard]] std::pmr::memory_resource& upstream() const noexcept { return *upstream_; }

 private:
  std::pmr::memory_resource* upstream_;
};

}  // namespace lamina::inline LAMINA_ABI
