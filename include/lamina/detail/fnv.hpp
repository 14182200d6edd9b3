// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// FNV-1a of 64 bits (Fowler, Noll and Vo): the hash so far, and one byte more.
inline constexpr std::uint64_t fnv_basis = 0xcbf29ce484222325;
constexpr std::uint64_t fnv(std::uint64_t hash, std::uint8_t byte) noexcept {
  return (hash ^ byte) * 0x100000001b3;
}
/// Eight bytes more, the lowest first.
constexpr std::uint64_t fnv_number(std::uint64_t hash, std::uint64_t number) noexcept {
  for (unsigned shift = 0; shift < 64; shift += 8)
    hash = fnv(hash, static_cast<std::uint8_t>(number >> shift));
  return hash;
}

}  // namespace lamina::inline LAMINA_ABI::detail
