// SPDX-License-Identifier: MIT
#include "errors_library.hpp"

#include <lamina/error.hpp>

namespace LAMINA_TEST_SIDE {

std::error_code truncated() {
  return lamina::errc::truncated;
}

bool is_truncated(const std::error_code& error) {
  return error == lamina::errc::truncated;
}

void throw_decode_error() {
  throw lamina::decode_error(lamina::errc::truncated, "a frame");
}

void throw_non_finite_gradient() {
  throw lamina::non_finite_gradient(1, 1, "b", "refused");
}

bool catches_decode_error(void (*throws)()) try {
  throws();
  return false;
} catch (const lamina::decode_error& error) {
  return error.code() == lamina::errc::truncated;
} catch (...) {
  return false;
}

bool catches_non_finite_gradient(void (*throws)()) try {
  throws();
  return false;
} catch (const lamina::non_finite_gradient& error) {
  return error.layer() == 1;
} catch (...) {
  return false;
}

}  // namespace LAMINA_TEST_SIDE
