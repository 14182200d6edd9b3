// SPDX-License-Identifier: MIT
#pragma once

#include <lamina/collectives/plan.hpp>
#include <string>

namespace lab {

/// The text of a plan that an earlier run has written. Throws std::runtime_error that names the file.
std::string read_plan(const std::string& file);
/// Writes DIRECTORY/plan.txt, over an earlier one, in a directory that is made if missing. Throws std::runtime_error that names the file.
void write_plan(const std::string& directory, const lamina::collectives::plan& made);

}  // namespace lab
