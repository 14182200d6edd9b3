// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// The value as memory would round it: a compiler may otherwise fuse a product with the sum that follows into one rounding
/// where the machine has FMA, and machines would decide differently.
template <class T>
T rounded(T value) {
#if defined(__GNUC__)
  asm volatile("" : "+m"(value));
#endif
  return value;
}

}  // namespace lamina::inline LAMINA_ABI::detail
