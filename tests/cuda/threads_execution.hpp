// SPDX-License-Identifier: MIT
#pragma once

#include <ucontext.h>

#include <atomic>
#include <barrier>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace lamina_test {

/// The threads of a team in one thread, each as far as its next barrier: in their order, and from there on backwards, and so on. What
/// one writes and another reads without a barrier between is read too early in one of the two orders. A stretch between two barriers
/// goes in one order where the team begins forwards, and in the other where it begins backwards: a test runs both. Threads of their own
/// meet a missing barrier by chance, and where they have fewer cores than threads they wait for each other for most of the time.
class threads_in_turn {
 public:
  /// Calls work(thread, *this) for each, which calls arrive_and_wait(). Throws std::logic_error where one ends and another waits.
  threads_in_turn(std::size_t count, bool begins_forwards,
                  std::function<void(unsigned, threads_in_turn&)> work)
      : work_(std::move(work)), threads_(count) {
    for (one& each : threads_) {
      each.stack.resize(stack_bytes);
      getcontext(&each.context);
      each.context.uc_stack.ss_sp = each.stack.data();
      each.context.uc_stack.ss_size = each.stack.size();
      each.context.uc_link = &caller_;
      makecontext(&each.context, &threads_in_turn::enter, 0);
    }
    for (bool is_forward = begins_forwards; ended_ == 0; is_forward = !is_forward) {
      for (std::size_t k = 0; k < count; ++k) {
        now_ = is_forward ? k : count - 1 - k;
        entered() = this;
        swapcontext(&caller_, &threads_[now_].context);
      }
    }
    if (ended_ != count) throw std::logic_error("a thread of a team has ended where another waits");
  }
  threads_in_turn(const threads_in_turn&) = delete;
  threads_in_turn& operator=(const threads_in_turn&) = delete;

  void arrive_and_wait() { swapcontext(&threads_[now_].context, &caller_); }

 private:
  static constexpr std::size_t stack_bytes = 256 * 1024;
  struct one {
    ucontext_t context;
    std::vector<char> stack;
  };

  static threads_in_turn*& entered() {
    static threads_in_turn* now = nullptr;
    return now;
  }
  static void enter() {
    threads_in_turn& self = *entered();
    self.work_(static_cast<unsigned>(self.now_), self);
    ++self.ended_;
  }

  std::function<void(unsigned, threads_in_turn&)> work_;
  std::vector<one> threads_;
  ucontext_t caller_{};
  std::size_t now_ = 0;
  std::size_t ended_ = 0;
};

/// Runs the kernels by teams of threads, one team after the other: what a GPU does with shared memory and barriers. Under a sanitizer
/// they are real ones, where the thread sanitizer can see them.
class by_threads {
 public:
  by_threads(unsigned threads, bool begins_forwards) : threads_(threads), begins_forwards_(begins_forwards) {}

  template <class Kernel>
  void run(const Kernel& kernel) const {
    typename Kernel::shared_memory shared;
    const auto work = [&](unsigned thread, auto& barrier) {
      for (std::size_t index = 0; index < kernel.teams(); ++index) {
        kernel(team(index, thread, threads_, barrier), shared);
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

 private:
  template <class Barrier>
  class team {
   public:
    team(std::size_t index, unsigned thread, unsigned threads, Barrier& barrier)
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
    Barrier& barrier_;
  };

  unsigned threads_;
  bool begins_forwards_;
};

}  // namespace lamina_test
