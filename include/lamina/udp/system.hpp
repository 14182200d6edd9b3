// SPDX-License-Identifier: MIT
#pragma once

/// What the other headers of lamina/udp need of the system: errors, file descriptors, the clock. Read this first, then address.hpp.

#if !defined(__linux__)
#error "lamina/udp needs Linux: it sends with sendmmsg and UDP_SEGMENT, and waits with epoll and timerfd"
#endif

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/bounded/rate.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/visible.hpp"

namespace lamina::inline LAMINA_ABI::udp {

/// The system refused a call, or a peer broke the protocol: the sentence names the address or the peer. Mistakes of the caller are
/// std::invalid_argument and std::logic_error. All of lamina/udp needs exceptions.
class LAMINA_VISIBLE error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// These ranks closed their connections, fell silent, or did not do in time what was waited for.
class LAMINA_VISIBLE peers_lost : public error {
 public:
  peers_lost(const std::string& what, std::vector<std::size_t> ranks)
      : error(what), ranks_(std::move(ranks)) {}
  [[nodiscard]] const std::vector<std::size_t>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<std::size_t> ranks_;
};

namespace detail {

/// The time, as the state machines of lamina/bounded take it.
inline bounded::instant clock_now() {
  return std::chrono::steady_clock::now().time_since_epoch();
}

/// Owns a file descriptor, or none.
class descriptor {
 public:
  descriptor() = default;
  explicit descriptor(int number) noexcept : number_(number) {}
  descriptor(descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  descriptor& operator=(descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~descriptor() { close(); }

  [[nodiscard]] int get() const noexcept { return number_; }
  [[nodiscard]] bool is_open() const noexcept { return number_ >= 0; }
  void close() noexcept {
    if (is_open()) ::close(std::exchange(number_, -1));
  }

 private:
  int number_ = -1;
};

/// An error with the system's own words for errno, or for another number, after `what`.
[[noreturn]] inline void throw_system_error(const std::string& what, int number = errno) {
  throw error(what + ": " + std::generic_category().message(number));
}

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI::udp
