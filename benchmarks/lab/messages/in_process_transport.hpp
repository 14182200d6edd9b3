// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <functional>
#include <optional>

#include "messages/lossy_way.hpp"
#include "messages/transport.hpp"

namespace lab {

struct in_process_options {
  rank_names name_of;
  /// Told of a rank that ends by an exception, after which the others go on without it. Empty: its exception ends all.
  std::function<void(std::size_t rank, const std::exception&)> on_death;
  /// Frames that are cut go over such a network, each pair of ranks having one to itself; none: nothing is lost.
  std::optional<lossy_options> losses = {};
};

/// Runs all ranks in one process, each in a thread of its own, of which one runs at a time: whoever waits hands on to the
/// next, in the order of the ranks, that has something to go on with. So a run needs one machine and no MPI, gives its
/// cores to one worker after the other, and always goes the same way, that of the asynchronous server included.
///
/// A channel for sums hands on likewise where nothing has come: an engine over it works by progress_by::caller, and a rank that waits for a
/// sum lets the others run.
///
/// `body` gets the end of each rank. If one throws, the others are ended where they wait, and the first exception is
/// thrown here. A rank that has ended is lost to those who wait for it, at once.
void run_in_process(std::size_t ranks, const std::function<void(transport&)>& body,
                    const in_process_options& options);

}  // namespace lab
