// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// What is wrong with a gradient. The first two are refusals, which a worker's step returns as a result; the others throw.
enum class mistake { non_finite, overflow, no_such_layer, wrong_size, wrong_element_type, wrong_count, no_gradient, bad_argument };

/// Where a pass over gradients puts what is wrong: here, an exception.
struct throws {
  template <class Make>
  void operator()(mistake, const Make& make) const {
    raise(make());
  }
  static constexpr bool has_failed() noexcept { return false; }
};

}  // namespace lamina::inline LAMINA_ABI::detail
