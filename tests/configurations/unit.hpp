// SPDX-License-Identifier: MIT
#pragma once

#include <string>

/// unit.cpp as two configurations of lamina in one program. Nothing of lamina's stands here, since its types have another
/// name in each.
namespace first_unit {
bool works();                ///< whether a worker's steps reach a server as they should
std::string own_sentence();  ///< of a frame that is cut short
}  // namespace first_unit

namespace second_unit {
bool works();
std::string own_sentence();
}  // namespace second_unit
