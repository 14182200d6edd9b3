// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <barrier>
#include <cstddef>
#include <thread>
#include <vector>

namespace lamina_test {

/// Runs the kernels by teams of real threads, one team after the other: what a GPU does with shared memory and barriers,
/// where the thread sanitizer can see it.
class by_threads {
 public:
  explicit by_threads(unsigned threads) : threads_(threads) {}

  template <class Kernel>
  void run(const Kernel& kernel) const {
    typename Kernel::shared_memory shared;
    std::barrier barrier(static_cast<std::ptrdiff_t>(threads_));
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < threads_; ++thread) {
      threads.emplace_back([&, thread] {
        for (std::size_t index = 0; index < kernel.teams(); ++index) {
          kernel(team(index, thread, threads_, barrier), shared);
          barrier.arrive_and_wait();
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
  void wait() const {}
  void require_device_memory(const void*, const char*) const {}
  void require_writable(const void*, std::size_t, const char*) const {}

 private:
  class team {
   public:
    team(std::size_t index, unsigned thread, unsigned threads, std::barrier<>& barrier)
        : index_(index), thread_(thread), threads_(threads), barrier_(barrier) {}
    std::size_t index() const { return index_; }
    unsigned thread() const { return thread_; }
    unsigned threads() const { return threads_; }
    void barrier() const { barrier_.arrive_and_wait(); }
    void add(unsigned long long& to, unsigned long long value) const { std::atomic_ref(to).fetch_add(value); }
    void lower(unsigned long long& to, unsigned long long value) const {
      std::atomic_ref<unsigned long long> target(to);
      unsigned long long seen = target.load();
      while (value < seen && !target.compare_exchange_weak(seen, value)) {
      }
    }

   private:
    std::size_t index_;
    unsigned thread_;
    unsigned threads_;
    std::barrier<>& barrier_;
  };

  unsigned threads_;
};

}  // namespace lamina_test
