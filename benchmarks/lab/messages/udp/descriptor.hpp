// SPDX-License-Identifier: MIT
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "messages/transport.hpp"

namespace lab {

/// Owns a file descriptor, or none.
class descriptor {
 public:
  descriptor() = default;
  explicit descriptor(int number) : number_(number) {}
  descriptor(descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  descriptor& operator=(descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~descriptor() { close(); }

  int get() const { return number_; }
  bool is_open() const { return number_ >= 0; }
  void close() {
    if (is_open()) ::close(std::exchange(number_, -1));
  }
  /// Stays open until the process ends.
  void leave_open() { number_ = -1; }

 private:
  int number_ = -1;
};

/// link_error with the system's own words for errno, or another error, behind `what`.
[[noreturn]] inline void throw_system_error(const std::string& what, int error = errno) {
  throw link_error(what + ": " + std::generic_category().message(error));
}

}  // namespace lab
