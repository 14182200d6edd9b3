// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <thread>

namespace resnet50_ps {

class stopwatch {
 public:
  /// Since its construction.
  double seconds() const { return std::chrono::duration<double>(clock::now() - start_).count(); }
  /// Returns when so many have passed.
  void wait_for(double seconds) const {
    std::this_thread::sleep_until(
        start_ + std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(seconds)));
  }

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point start_ = clock::now();
};

}  // namespace resnet50_ps
