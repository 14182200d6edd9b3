// SPDX-License-Identifier: MIT
// Errors of lamina's go from one shared library to another, both with hidden symbols.
#include <cstdio>

#include "errors_library.hpp"

namespace {

int failures = 0;

void check(bool holds, const char* what) {
  std::printf("%s: %s\n", what, holds ? "yes" : "NO");
  failures += holds ? 0 : 1;
}

}  // namespace

int main() {
  check(left::is_truncated(left::truncated()), "the code within one library");
  check(left::is_truncated(right::truncated()), "the code from right to left");
  check(right::is_truncated(left::truncated()), "the code from left to right");
  check(left::truncated() == right::truncated(), "two codes");
  check(left::catches_decode_error(right::throw_decode_error), "decode_error from right to left");
  check(right::catches_decode_error(left::throw_decode_error), "decode_error from left to right");
  check(left::catches_non_finite_gradient(right::throw_non_finite_gradient),
        "non_finite_gradient from right to left");
  check(right::catches_non_finite_gradient(left::throw_non_finite_gradient),
        "non_finite_gradient from left to right");
  return failures == 0 ? 0 : 1;
}
