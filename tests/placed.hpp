// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "lamina/detail/residual_block.hpp"

namespace lamina_test {

/// The same numbers from `offset` elements behind the start of a cache line.
template <class G>
class placed {
 public:
  placed(std::span<const G> values, std::size_t offset) : memory_(offset + values.size()), offset_(offset) {
    std::ranges::fill_n(memory_.begin(), static_cast<std::ptrdiff_t>(offset), G{});
    std::ranges::copy(values, memory_.begin() + offset);
  }
  std::span<const G> values() const { return std::span(memory_).subspan(offset_); }
  G* data() const { return memory_.data() + offset_; }

 private:
  lamina::detail::buffer<G> memory_;
  std::size_t offset_;
};

}  // namespace lamina_test
