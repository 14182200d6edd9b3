// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/version.h>

#include "lamina/detail/abi.hpp"

/// Thrust where it is: programs that share a process with another Thrust put theirs into a namespace of its own by
/// THRUST_CUB_WRAPPED_NAMESPACE.
namespace lamina::inline LAMINA_ABI::cuda {

namespace thrust = THRUST_NS_QUALIFIER;

}  // namespace lamina::inline LAMINA_ABI::cuda
