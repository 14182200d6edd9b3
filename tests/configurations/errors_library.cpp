// SPDX-License-Identifier: MIT
#include "errors_library.hpp"

#include <lamina/error.hpp>

template <class Error, class IsRight>
static bool catches(void (*throws)(), const IsRight& is_right) try {
  throws();
  return false;
} catch (const Error& error) {
  return is_right(error);
} catch (...) {
  return false;
}

const errors_of_library& LAMINA_TEST_SIDE() {
  using lamina::errc;
  static const errors_of_library own = {[] { return std::error_code(errc::truncated); },
                                        [](const std::error_code& error) { return error == errc::truncated; },
                                        [] { throw lamina::decode_error(errc::truncated, "a frame"); },
                                        [] { throw lamina::non_finite_gradient(1, 1, "b", "refused"); },
                                        [](void (*throws)()) {
                                          return catches<lamina::decode_error>(throws, [](const auto& error) {
                                            return error.code() == errc::truncated;
                                          });
                                        },
                                        [](void (*throws)()) {
                                          return catches<lamina::non_finite_gradient>(
                                              throws, [](const auto& error) { return error.layer() == 1; });
                                        }};
  return own;
}
