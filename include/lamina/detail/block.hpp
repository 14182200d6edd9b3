// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// What reduction.hpp cuts a tensor into, how many sums a block has, and how many totals are combined one after the other.
inline constexpr std::size_t block_elements = 4096;
inline constexpr std::size_t lanes = 64;
inline constexpr std::size_t totals_per_run = 64;

}  // namespace lamina::inline LAMINA_ABI::detail
