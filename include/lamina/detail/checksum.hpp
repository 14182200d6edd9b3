// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lamina/detail/abi.hpp"

// Inlined, so that nothing is to be linked. What this header cannot undo: xxHash's own macros stay, and where a file includes
// <xxhash.h> after it, the functions there are the inlined ones as well. They do the same; a file that wants those of
// libxxhash, or other settings of xxHash, defines LAMINA_NO_XXHASH or leaves lamina to another file.
#if !defined(LAMINA_NO_XXHASH) && __has_include(<xxhash.h>)
#if defined(XXH_INLINE_ALL)
#include <xxhash.h>
#else
#define XXH_INLINE_ALL
#include <xxhash.h>
#undef XXH_INLINE_ALL
#endif
#define LAMINA_HAS_XXHASH 1
#else
#define LAMINA_HAS_XXHASH 0
#endif

namespace lamina::inline LAMINA_ABI::detail {

/// XXH3 (64 bits, seed 0) over bytes that come in pieces. Without xxHash's header frames are written without a
/// checksum, and the frame says so.
class checksum {
 public:
#if LAMINA_HAS_XXHASH
  static constexpr bool available = true;
  checksum() noexcept {
    XXH3_64bits_reset(&state_);
  }
  void add(std::span<const std::byte> bytes) noexcept {
    if (!bytes.empty()) XXH3_64bits_update(&state_, bytes.data(), bytes.size());
  }
  [[nodiscard]] std::uint64_t value() const noexcept {
    return XXH3_64bits_digest(&state_);
  }

 private:
  XXH3_state_t state_;
#else
  static constexpr bool available = false;
  void add(std::span<const std::byte>) noexcept {}
  [[nodiscard]] std::uint64_t value() const noexcept {
    return 0;
  }
#endif
};

}  // namespace lamina::inline LAMINA_ABI::detail
