// SPDX-License-Identifier: MIT
#pragma once

#include <system_error>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/error.hpp"

/// A call that comes both ways, with exceptions and with a std::error_code, is written once, over where its errors go:
///
///     if (count != expected) return fail(errc::wrong_count, [&] { return std::invalid_argument("..."); });
///
/// The sentence is only put together where somebody will read it.
namespace lamina::inline LAMINA_ABI::detail {

struct throws {
  template <class Make>
  void operator()(errc, const Make& make) const {
    raise(make());
  }
  static constexpr bool has_failed() noexcept { return false; }
};

/// Sets `error`, which the caller has cleared.
class reports {
 public:
  explicit reports(std::error_code& error) : error_(error) { error.clear(); }
  template <class Make>
  void operator()(errc code, const Make&) const noexcept {
    error_ = make_error_code(code);
  }
  bool has_failed() const noexcept { return static_cast<bool>(error_); }

 private:
  std::error_code& error_;
};

}  // namespace lamina::inline LAMINA_ABI::detail
