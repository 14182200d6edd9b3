// SPDX-License-Identifier: MIT
#pragma once

#include <memory>
#include <string>

#include "launch/launch_info.hpp"
#include "launch/training.hpp"
#include "messages/transport.hpp"

/// --transport udp: what the options mean to sockets.
namespace lab {

/// Throws std::invalid_argument, naming the option, if this machine has no address that is meant.
lamina::udp::rank_addresses udp_paths_of(const lab::options& options, const launch_info& here);

/// All ranks of run.communicator meet: by MPI, once, and from then on by sockets alone. Throws link_error.
std::unique_ptr<transport> meet_over_udp(const training& run, const replica& local);

/// What of the options must be the same on all ranks, in words.
std::string describe_udp(const lab::options& options);

}  // namespace lab
