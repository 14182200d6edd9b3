// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/detail/abi.hpp"

#if !LAMINA_HAS_EXCEPTIONS
#include <cstdio>
#include <cstdlib>
#endif

namespace lamina::inline LAMINA_ABI::detail {

/// Throws. Compiled with -fno-exceptions there is no way back to a caller that made a mistake: the sentence goes to stderr
/// and the program ends. What such a program can meet in its steps without a mistake of its own, frames from outside and
/// gradients that are not finite, has calls that take a std::error_code.
template <class Exception>
[[noreturn]] void raise(const Exception& exception) {
#if LAMINA_HAS_EXCEPTIONS
  throw exception;
#else
  std::fputs("lamina: ", stderr);
  std::fputs(exception.what(), stderr);
  std::fputs("\n", stderr);
  std::abort();
#endif
}

}  // namespace lamina::inline LAMINA_ABI::detail
