// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::collectives::detail {

/// How long a rank has looked for messages, and seen nothing move. Time in which it did not look is not the silence of others: of what
/// lies between two looks 10 ms count at most.
class patience {
 public:
  using clock = std::chrono::steady_clock;

  /// Throws std::invalid_argument for a timeout that is not above 0.
  explicit patience(std::chrono::milliseconds timeout) : timeout_(timeout) {
    if (timeout.count() <= 0) {
      throw std::invalid_argument("a timeout of " + std::to_string(timeout.count()) +
                                  " ms: it must be above 0");
    }
  }

  /// Something has moved.
  void renew(clock::time_point now) noexcept {
    silence_ = {};
    looked_at_ = now;
  }
  /// Nothing has. Whether that is so for as long as the timeout.
  [[nodiscard]] bool is_over(clock::time_point now) noexcept {
    silence_ += std::min<clock::duration>(now - looked_at_, most_between_looks);
    looked_at_ = now;
    // In the timeout's unit: the largest timeout there is has too many nanoseconds for a clock.
    return std::chrono::duration_cast<std::chrono::milliseconds>(silence_) >= timeout_;
  }

 private:
  static constexpr std::chrono::milliseconds most_between_looks{10};

  std::chrono::milliseconds timeout_;
  clock::duration silence_{};
  clock::time_point looked_at_ = clock::now();
};

}  // namespace lamina::inline LAMINA_ABI::collectives::detail
