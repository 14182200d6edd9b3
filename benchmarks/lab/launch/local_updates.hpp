// SPDX-License-Identifier: MIT
#pragma once

#include <lamina/payload.hpp>
#include <string>

#include "launch/options.hpp"
#include "launch/training.hpp"
#include "loops/local_updates.hpp"

namespace CLI {
class App;
}

/// The options of local updates: what they are, which exclude one another, what they mean.
namespace lab {

void add_local_update_options(CLI::App& app, options& into);

/// A sentence that names both options where one cannot be with another; empty where nothing is wrong. Defaults must be set.
std::string mistake_in_local_updates(const options& given);

/// What all ranks must have alike and a checkpoint must have been made with; empty with the defaults.
std::string describe_local_updates(const options& given);

/// What they mean to the loops. The outer step refuses
/// what is out of its range.
local_options local_options_of(const training& run);

/// By its name on the command line.
lamina::payload_type payload_named(const std::string& name);

}  // namespace lab
