// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

/// Executions that run tasks in another order than lamina::sequential, which must change no bit.
namespace lamina_test {

inline constexpr auto in_reverse = [](std::size_t tasks, auto&& work) {
  for (std::size_t i = tasks; i-- > 0;) work(i);
};

/// The same, and it says how many threads it has.
struct pool {
  std::size_t size;
  std::size_t threads() const { return size; }
  void operator()(std::size_t tasks, auto&& work) const { in_reverse(tasks, work); }
};

/// In so many threads, whichever of them comes first.
inline auto in_threads_of(std::size_t threads) {
  return [threads](std::size_t tasks, auto&& work) {
    std::atomic<std::size_t> next{0};
    const auto take_tasks = [&] {
      for (std::size_t i = next++; i < tasks; i = next++) work(i);
    };
    std::vector<std::thread> others;
    for (std::size_t t = 1; t < threads; ++t) others.emplace_back(take_tasks);
    take_tasks();
    for (std::thread& each : others) each.join();
  };
}

}  // namespace lamina_test
