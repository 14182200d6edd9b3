// SPDX-License-Identifier: MIT
#pragma once

#include <system_error>

/// Two shared libraries that are alike: what each says of its own errors and of the other's.
#define LAMINA_TEST_EXPORT __attribute__((visibility("default")))
#define LAMINA_TEST_DECLARE(side)                                                                   \
  namespace side {                                                                                  \
  LAMINA_TEST_EXPORT std::error_code truncated();                                                   \
  LAMINA_TEST_EXPORT bool is_truncated(const std::error_code& error);                               \
  LAMINA_TEST_EXPORT void throw_decode_error();                                                     \
  LAMINA_TEST_EXPORT void throw_non_finite_gradient();                                              \
  LAMINA_TEST_EXPORT bool catches_decode_error(void (*throws)());        /* with the right code */  \
  LAMINA_TEST_EXPORT bool catches_non_finite_gradient(void (*throws)()); /* with the right layer */ \
  }
LAMINA_TEST_DECLARE(left)
LAMINA_TEST_DECLARE(right)
