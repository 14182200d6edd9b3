// SPDX-License-Identifier: MIT
#include "replica.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

namespace resnet50_ps {

std::uint64_t hash_of(const lamina::layout& model, const parameter_store& parameters) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const auto bytes = std::as_bytes(parameters(l));
    XXH3_64bits_update(&state, bytes.data(), bytes.size());
  }
  return std::max<std::uint64_t>(1, XXH3_64bits_digest(&state));
}

}  // namespace resnet50_ps
