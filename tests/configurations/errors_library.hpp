// SPDX-License-Identifier: MIT
#pragma once

#include <system_error>

/// Two shared libraries that are alike: what each says of its own errors and of the other's.
struct errors_of_library {
  std::error_code (*truncated)();
  bool (*is_truncated)(const std::error_code& error);
  void (*throw_decode_error)();
  void (*throw_non_finite_gradient)();
  bool (*catches_decode_error)(void (*throws)());         // with the right code
  bool (*catches_non_finite_gradient)(void (*throws)());  // with the right layer
};
__attribute__((visibility("default"))) const errors_of_library& left();
__attribute__((visibility("default"))) const errors_of_library& right();
