// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lamina/detail/abi.hpp"

// Inlined, so that nothing is to be linked. What this header cannot undo: xxHash's own macros stay, and where a file includes
// <xxhash.h> after it, the functions there are the inlined ones as well. They do the same; a file that wants those of
// libxxhash, or other settings of xxHash, leaves lamina to another file.
#if defined(XXH_INLINE_ALL)
#include <xxhash.h>  // of the package libxxhash-dev, xxhash or xxHash
#else
#define XXH_INLINE_ALL
#include <xxhash.h>  // of the package libxxhash-dev, xxhash or xxHash
#undef XXH_INLINE_ALL
#endif

namespace lamina::inline LAMINA_ABI::detail {

/// XXH3 (64 bits, seed 0) over bytes that come in several spans.
class checksum {
 public:
  checksum() noexcept { XXH3_64bits_reset(&state_); }
  checksum& add(std::span<const std::byte> bytes) noexcept {
    if (!bytes.empty()) XXH3_64bits_update(&state_, bytes.data(), bytes.size());
    return *this;
  }
  [[nodiscard]] std::uint64_t value() const noexcept { return XXH3_64bits_digest(&state_); }

 private:
  XXH3_state_t state_;
};

}  // namespace lamina::inline LAMINA_ABI::detail
