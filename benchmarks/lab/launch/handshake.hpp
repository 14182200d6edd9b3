// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <lamina/layout.hpp>

#include "launch/training.hpp"
#include "messages/transport.hpp"

namespace lab {

/// Ranks may come from other builds and other command lines: nothing is sent before they are known to be alike. Everyone
/// introduces itself to rank 0, which answers with the steps that are done already: `steps_done` there, returned on all.
/// Throws link_error that names a rank which was started for another run.
std::uint64_t shake_hands(transport& ranks, const training& run, const lamina::layout& model,
                          std::uint64_t steps_done);

}  // namespace lab
