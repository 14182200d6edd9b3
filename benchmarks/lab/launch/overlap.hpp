// SPDX-License-Identifier: MIT
#pragma once

#include <string>

#include "launch/options.hpp"
#include "launch/training.hpp"
#include "loops/overlapped.hpp"
#include "loops/streaming.hpp"

namespace CLI {
class App;
}

/// The options of what overlaps with the computation, sums among the workers or a server's parts: what they are, which exclude one another,
/// what they mean.
namespace lab {

void add_overlap_options(CLI::App& app, options& into);

/// A sentence that names both options where one cannot be with another; empty where nothing is wrong. Defaults must be set.
std::string mistake_in_overlap(const options& given);
/// The same where it takes the number of workers. Throws std::invalid_argument.
void check_overlap(const training& run);

/// What all ranks must have alike of how gradients are exchanged; empty with the defaults.
std::string describe_overlap(const options& given);

/// What they mean to the loop; and to that of workers which decide as_ready, and their server.
overlap_options overlap_options_of(const training& run);
streaming_options streaming_options_of(const options& given);

}  // namespace lab
