// SPDX-License-Identifier: MIT
// Errors of lamina's go from one shared library to another, both with hidden symbols.
#include <cstdio>
#include <utility>

#include "errors_library.hpp"

namespace {

int failures = 0;

void check(bool holds, const char* what) {
  std::printf("%s: %s\n", what, holds ? "yes" : "NO");
  failures += holds ? 0 : 1;
}

}  // namespace

int main() {
  check(left().is_truncated(left().truncated()), "the code within one library");
  check(left().truncated() == right().truncated(), "two codes");
  for (const auto& [own, other] : {std::pair(&left(), &right()), std::pair(&right(), &left())}) {
    std::puts(own == &left() ? "from right to left:" : "from left to right:");
    check(own->is_truncated(other->truncated()), "the code");
    check(own->catches_decode_error(other->throw_decode_error), "decode_error");
    check(own->catches_non_finite_gradient(other->throw_non_finite_gradient), "non_finite_gradient");
  }
  return failures == 0 ? 0 : 1;
}
