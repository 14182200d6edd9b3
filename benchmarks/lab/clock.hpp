// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <thread>

namespace lab {

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

/// What a rank spends at work: stands still while it waits for others.
class work_clock {
 public:
  class pause {
   public:
    explicit pause(work_clock& paused) : clock_(paused) {
      if (clock_.pauses_++ == 0) clock_.worked_ += clock_.running_.seconds();
    }
    ~pause() {
      if (--clock_.pauses_ == 0) clock_.running_ = stopwatch();
    }
    pause(const pause&) = delete;
    pause& operator=(const pause&) = delete;

   private:
    work_clock& clock_;
  };

  /// Since the last take().
  double seconds() const { return worked_ + (pauses_ == 0 ? running_.seconds() : 0); }
  double take() {
    const double taken = seconds();
    worked_ = 0;
    running_ = stopwatch();
    return taken;
  }

 private:
  stopwatch running_;
  double worked_ = 0;
  int pauses_ = 0;
};

}  // namespace lab
