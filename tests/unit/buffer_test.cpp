// SPDX-License-Identifier: MIT
#include "lamina/detail/residual_block.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory_resource>
#include <new>
#include <span>
#include <stdexcept>
#include <utility>

#include "catch.hpp"
#include "lamina/half.hpp"

namespace lamina_test::buffer_test {

namespace {

using lamina::detail::buffer;

bool is_aligned(const void* memory, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(memory) % alignment == 0;
}

// Hands out bytes of 0xa5 and keeps the books.
class counting_resource final : public std::pmr::memory_resource {
 public:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (fails) throw std::bad_alloc();
    void* memory = ::operator new (bytes, std::align_val_t{alignment});
    std::memset(memory, 0xa5, bytes);
    alive[memory] = {bytes, alignment};
    ++allocations;
    return memory;
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) noexcept override {
    const auto found = alive.find(memory);
    if (found == alive.end() || found->second != std::pair(bytes, alignment)) {
      ++mistakes;
      return;
    }
    alive.erase(found);
    ::operator delete (memory, std::align_val_t{alignment});
  }

  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

  bool fails = false;
  std::size_t allocations = 0;
  std::size_t mistakes = 0;
  std::map<void*, std::pair<std::size_t, std::size_t>> alive;  // bytes and alignment
};

}  // namespace

TEMPLATE_TEST_CASE("buffer: begins at a cache line and holds what is written; no elements take no memory", "",
                   float, double, lamina::float16, std::byte) {
  counting_resource resource;
  CHECK(buffer<TestType>(0, &resource).size() == 0);
  CHECK(resource.allocations == 0);
  for (const std::size_t count : std::array<std::size_t, 5>{1, 3, 64, 1000, 100'000}) {
    buffer<TestType> memory(count);
    REQUIRE(is_aligned(memory.data(), 64));
    REQUIRE(memory.size() == count);
    std::ranges::fill(memory, TestType{});
    REQUIRE(std::ranges::count(memory, TestType{}) == static_cast<std::ptrdiff_t>(count));
    REQUIRE(std::span<TestType>(memory).data() == memory.data());
  }
  struct alignas(256) wide {
    char bytes[256];
  };
  CHECK(is_aligned(buffer<wide>(3).data(), 256));
}

TEST_CASE("buffer: the memory of a resource is not touched, and goes back to it") {
  counting_resource resource;
  {
    const buffer<double> memory(1000, &resource);
    CHECK(is_aligned(memory.data(), 64));
    REQUIRE(resource.alive.size() == 1);
    CHECK(resource.alive.begin()->second == std::pair<std::size_t, std::size_t>(8000, 64));
    const auto bytes = std::as_bytes(std::span(memory));
    CHECK(std::ranges::all_of(bytes, [](std::byte each) { return each == std::byte{0xa5}; }));
  }
  CHECK(resource.alive.empty());
  CHECK(resource.mistakes == 0);
}

TEST_CASE("buffer: more than there is is refused") {
  constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();
  counting_resource resource;
  CHECK_THROWS_AS(buffer<double>(huge), std::length_error);
  CHECK_THROWS_AS(buffer<double>(huge / 8 + 1, &resource), std::length_error);  // its bytes would wrap round
  CHECK(resource.allocations == 0);
}

TEST_CASE("buffer: the memory of an arena, until there is none left") {
  alignas(64) std::byte arena[4096];
  std::pmr::monotonic_buffer_resource resource(arena, sizeof arena, std::pmr::null_memory_resource());
  const buffer<float> memory(512, &resource);
  CHECK(static_cast<const void*>(memory.data()) == arena);
  CHECK_THROWS_AS(buffer<float>(1024, &resource), std::bad_alloc);
}

}  // namespace lamina_test::buffer_test
