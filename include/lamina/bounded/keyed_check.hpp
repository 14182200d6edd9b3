// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/checksum.hpp"

namespace lamina::inline LAMINA_ABI::bounded {

/// The check of packets and control messages: XXH3 of 64 bits, seeded with the secret of the run. It notices damage, and bytes of those
/// who do not know the secret; it is no MAC against somebody who reads the network. Allocates nothing.
class keyed_check {
 public:
  explicit keyed_check(std::uint64_t secret) noexcept : secret_(secret) {}

  /// Of these bytes as if they were joined.
  [[nodiscard]] std::uint64_t of(std::initializer_list<std::span<const std::byte>> pieces) noexcept {
    begin();
    for (const auto piece : pieces) add(piece);
    return value();
  }
  /// The same in steps, for who has any number of pieces.
  void begin() noexcept {
    // The same seed as before, so that xxHash derives its own secret from it but once.
    XXH3_64bits_reset_withSeed(&state_, secret_);
  }
  void add(std::span<const std::byte> piece) noexcept {
    if (!piece.empty()) XXH3_64bits_update(&state_, piece.data(), piece.size());
  }
  [[nodiscard]] std::uint64_t value() noexcept { return XXH3_64bits_digest(&state_); }

 private:
  std::uint64_t secret_;
  XXH3_state_t state_{};  // zeros: xxHash looks at the seed that it had before
};

}  // namespace lamina::inline LAMINA_ABI::bounded
