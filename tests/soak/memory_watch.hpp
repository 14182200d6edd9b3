// SPDX-License-Identifier: MIT
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>

namespace soak {

/// Sees to it that a process does not grow: looked at once a checkpoint, where all buffers of a round are as they were
/// at the one before.
class memory_watch {
 public:
  /// Throws std::runtime_error if the resident memory has grown beyond what it was after the warm-up.
  void look() {
    const std::uint64_t now = resident_bytes();
    peak_ = std::max(peak_, now);
    if (++looks_ <= warm_up_looks) {
      baseline_ = std::max(baseline_, now);
    } else if (now > baseline_) {
      growth_ = std::max(growth_, now - baseline_);
    }
    if (growth_ > tolerated_bytes) {
      throw std::runtime_error("memory grew by " + std::to_string(growth_) + " bytes, to " +
                               std::to_string(now));
    }
  }
  std::uint64_t growth_bytes() const noexcept { return growth_; }
  std::uint64_t peak_bytes() const noexcept { return peak_; }

 private:
  // By then the largest frame has mostly been seen, and the allocator knows the sizes of a checkpoint.
  static constexpr int warm_up_looks = 8;
  // Buffers grow to the largest frame so far, at most the model's 75 kB for each of eight workers, wherever in the run it
  // comes, and the allocator keeps some of the old ones. A leak of one frame in a hundred rounds is more in 2,000 rounds.
  // With packets a burst larger than any before touches pages of the sockets' buffers for the first time: up to 2 MB of a socket.
  static constexpr std::uint64_t tolerated_bytes = 3U << 20U;

  // 0 where the system does not tell, and under a sanitizer, which keeps what was freed.
  static std::uint64_t resident_bytes() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 0;
#else
    std::ifstream statm("/proc/self/statm");
    std::uint64_t size = 0;
    std::uint64_t resident = 0;
    statm >> size >> resident;
    return statm ? resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)) : 0;
#endif
  }

  int looks_ = 0;
  std::uint64_t baseline_ = 0;
  std::uint64_t growth_ = 0;
  std::uint64_t peak_ = 0;
};

}  // namespace soak
