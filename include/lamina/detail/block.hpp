// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// What reduction.hpp cuts a tensor into, and how many sums a block has.
inline constexpr std::size_t block_elements = 4096;
inline constexpr std::size_t lanes = 64;

}  // namespace lamina::inline LAMINA_ABI::detail
