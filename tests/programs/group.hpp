// SPDX-License-Identifier: MIT
#pragma once

#include <barrier>
#include <cstddef>
#include <exception>
#include <functional>
#include <span>
#include <thread>
#include <vector>

/// Ranks as threads of one process, with the two collectives that the programs need.
class group {
 public:
  explicit group(std::size_t ranks)
      : ranks_(ranks), parts_(ranks), barrier_(static_cast<std::ptrdiff_t>(ranks)) {}

  /// Runs `program(rank)` on all ranks and waits for them; rethrows what the first of them throws.
  void run(const std::function<void(std::size_t)>& program) {
    std::vector<std::exception_ptr> thrown(ranks_);
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          program(rank);
        } catch (...) {
          thrown[rank] = std::current_exception();
          barrier_.arrive_and_drop();
        }
      });
    }
    for (std::thread& each : threads) each.join();
    for (const std::exception_ptr& each : thrown) {
      if (each) std::rethrow_exception(each);
    }
  }

  template <class Number>
  void sum(std::size_t rank, std::span<Number> numbers) {
    parts_[rank] = numbers.data();
    barrier_.arrive_and_wait();
    std::vector<Number> all(numbers.size());
    for (void* part : parts_) {
      for (std::size_t i = 0; i < all.size(); ++i) all[i] += static_cast<Number*>(part)[i];
    }
    barrier_.arrive_and_wait();
    std::copy(all.begin(), all.end(), numbers.begin());
  }
  void average(std::size_t rank, std::span<double> numbers) {
    sum(rank, numbers);
    for (double& each : numbers) each /= static_cast<double>(ranks_);
  }

 private:
  std::size_t ranks_;
  std::vector<void*> parts_;
  std::barrier<> barrier_;
};
