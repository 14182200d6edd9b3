// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <lamina/bounded/rate.hpp>

namespace lab {

/// The time as the machines of lamina/bounded take it.
inline lamina::bounded::instant clock_now() {
  return std::chrono::steady_clock::now().time_since_epoch();
}

}  // namespace lab
