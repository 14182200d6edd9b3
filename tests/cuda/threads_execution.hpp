// SPDX-License-Identifier: MIT
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/cuda/detail/thread_block.hpp"

namespace lamina_test {

/// The threads of a thread block in one thread, each as far as its next barrier: in their order, and from there on backwards, and so on. What
/// one writes and another reads without a barrier between is read too early in one of the two orders. A stretch between two barriers
/// goes in one order where the thread block begins forwards, and in the other where it begins backwards: a test runs both. Threads of their own
/// meet a missing barrier by chance, and where they have fewer cores than threads they wait for each other for most of the time.
class threads_in_turn {
 public:
  /// Calls work(thread, *this) for each, which calls arrive_and_wait(). Throws std::logic_error where one ends and another waits.
  threads_in_turn(std::size_t count, bool begins_forwards,
                  std::function<void(unsigned, threads_in_turn&)> work)
      : work_(std::move(work)),
        threads_(count),
        is_forward_(begins_forwards),
        now_(begins_forwards ? 0 : count - 1) {
    for (one& each : threads_) {
      each.stack = std::make_unique_for_overwrite<char[]>(stack_bytes);
      getcontext(&each.context);
      each.context.uc_stack.ss_sp = each.stack.get();
      each.context.uc_stack.ss_size = stack_bytes;
      makecontext(&each.context, &threads_in_turn::enter, 0);
    }
    entered() = this;
    swapcontext(&caller_, &threads_[now_].context);
    if (ended_ != count) throw std::logic_error("a thread of a thread block has ended where another waits");
  }
  threads_in_turn(const threads_in_turn&) = delete;
  threads_in_turn& operator=(const threads_in_turn&) = delete;

  void arrive_and_wait() {
    ucontext_t& own = threads_[now_].context;
    if (ucontext_t* next = next_to_run()) {
      swapcontext(&own, next);
    } else if (ended_ > 0) {
      swapcontext(&own, &caller_);
    }
  }

 private:
  static constexpr std::size_t stack_bytes = 256 * 1024;
  struct one {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
  };

  static threads_in_turn*& entered() {
    static threads_in_turn* now = nullptr;
    return now;
  }
  static void enter() {
    threads_in_turn& self = *entered();
    self.work_(static_cast<unsigned>(self.now_), self);
    ++self.ended_;
    const ucontext_t* next = self.next_to_run();
    setcontext(next != nullptr ? next : &self.caller_);
  }
  // None where all have come to the barrier: then the last of them is the first to go on, since the order turns.
  ucontext_t* next_to_run() {
    if (++arrived_ == threads_.size()) {
      arrived_ = 0;
      is_forward_ = !is_forward_;
      return nullptr;
    }
    now_ = is_forward_ ? now_ + 1 : now_ - 1;
    return &threads_[now_].context;
  }

  std::function<void(unsigned, threads_in_turn&)> work_;
  std::vector<one> threads_;
  ucontext_t caller_{};
  bool is_forward_;
  std::size_t now_;
  std::size_t arrived_ = 0;  // at the barrier
  std::size_t ended_ = 0;
};

/// Runs the kernels by thread blocks of many threads, one after the other: what a GPU does with shared memory and barriers. Under a sanitizer
/// they are real ones, where the thread sanitizer can see them.
///
/// A group is one thread. The thread blocks of a launch go in one order or the other as well, so that another one is the last to arrive.
class by_threads {
 public:
  by_threads(unsigned threads, bool begins_forwards) : threads_(threads), begins_forwards_(begins_forwards) {}

  template <class Kernel>
  void run(const Kernel& kernel) const {
    typename Kernel::shared_memory shared;
    bool is_last = false;
    std::vector<unsigned long long> exchanged(std::size_t{most_exchanged} * threads_);
    const std::size_t grid = kernel.thread_blocks(threads_);
    const auto work = [&](unsigned thread, auto& barrier) {
      for (std::size_t k = 0; k < grid; ++k) {
        const std::size_t index = begins_forwards_ ? k : grid - 1 - k;
        kernel(thread_block({index, grid}, {thread, threads_}, barrier, is_last, exchanged), shared);
        barrier.arrive_and_wait();
      }
    };
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    std::barrier barrier(static_cast<std::ptrdiff_t>(threads_));
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < threads_; ++thread)
      threads.emplace_back([&, thread] { work(thread, barrier); });
    for (auto& thread : threads) thread.join();
#else
    threads_in_turn(threads_, begins_forwards_, work);
#endif
  }
  void wait() const {}
  void require_device_memory(const void*, const char*) const {}
  void require_writable(const void*, std::size_t, const char*) const {}
  void require_no_capture(const char*) const {}
  void require_current_device() const {}

 private:
  template <class Barrier>
  class thread_block {
   public:
    thread_block(std::pair<std::size_t, std::size_t> index_of_grid,
                 std::pair<unsigned, unsigned> thread_of_threads, Barrier& barrier, bool& is_last,
                 std::vector<unsigned long long>& exchanged)
        : index_(index_of_grid.first),
          grid_(index_of_grid.second),
          thread_(thread_of_threads.first),
          threads_(thread_of_threads.second),
          barrier_(barrier),
          is_last_(is_last),
          exchanged_(exchanged) {}
    std::size_t index() const { return index_; }
    std::size_t grid() const { return grid_; }
    unsigned thread() const { return thread_; }
    unsigned threads() const { return threads_; }
    unsigned groups() const { return threads_; }
    lamina::cuda::detail::serial_group group() const { return {thread_}; }
    void barrier() const { barrier_.arrive_and_wait(); }
    void wait_for_launches() const {}
    void prefetch(const void*) const {}
    // Threads of their own add at the same time.
    void add(lamina::cuda::detail::shared_sum& sum, unsigned long long addend) const {
      const auto low = static_cast<std::uint32_t>(addend);
      const std::uint32_t before = std::atomic_ref(sum.low).fetch_add(low);
      std::atomic_ref(sum.high).fetch_add(static_cast<std::uint32_t>(addend >> 32U) +
                                          (before + low < before ? 1 : 0));
    }
    std::uint32_t count(std::uint32_t& counter) const { return std::atomic_ref(counter).fetch_add(1); }

    template <unsigned Count>
    void least(unsigned long long (&values)[Count],
               lamina::cuda::detail::block_scratch<Count>& scratch) const {
      exchange(values, scratch);
      for (unsigned k = 0; k < Count; ++k) {
        const auto first = exchanged_.begin() + k * threads_;
        values[k] = *std::min_element(first, first + threads_);
      }
      barrier();
    }
    unsigned long long sum_before(unsigned long long& own,
                                  lamina::cuda::detail::block_scratch<1>& scratch) const {
      const unsigned long long value[1] = {own};
      exchange(value, scratch);
      const auto first = exchanged_.begin();
      own = std::accumulate(first, first + thread_, 0ULL);
      const unsigned long long all = std::accumulate(first, first + threads_, 0ULL);
      barrier();
      return all;
    }

    bool is_last_to_arrive(std::uint32_t& counter, std::uint32_t count) const {
      barrier();
      if (thread_ == 0) {
        is_last_ = std::atomic_ref(counter).fetch_add(1) + 1 == count;
        if (is_last_) counter = 0;
      }
      barrier();
      return is_last_;
    }

   private:
    // Not through the scratch, in which a thread block has one place a warp, but over it: it is not for anything else meanwhile.
    template <unsigned Count>
    void exchange(const unsigned long long (&values)[Count],
                  lamina::cuda::detail::block_scratch<Count>& scratch) const {
      if (thread_ == 0) std::memset(&scratch, 0xa5, sizeof scratch);
      for (unsigned k = 0; k < Count; ++k) exchanged_[k * threads_ + thread_] = values[k];
      barrier();
    }

    std::size_t index_;
    std::size_t grid_;
    unsigned thread_;
    unsigned threads_;
    Barrier& barrier_;
    bool& is_last_;
    std::vector<unsigned long long>& exchanged_;
  };

  static constexpr unsigned most_exchanged = 8;  // numbers of a thread at a time

  unsigned threads_;
  bool begins_forwards_;
};

}  // namespace lamina_test
