// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <functional>

#include "link.hpp"

namespace resnet50_ps {

/// Runs a server and its workers in one process, each in a thread of its own, of which one runs at a time: whoever waits
/// hands on to the next, in the order server, worker 0, worker 1, ..., that has something to go on with. So a run needs one
/// machine and no MPI, gives its cores to one worker after the other, and always goes the same way, that of the
/// asynchronous server included.
///
/// `serve` and `work` get the ends of their links. If one throws, the others are ended where they wait, and the first
/// exception is thrown here.
void run_in_process(std::size_t workers, const std::function<void(server_link&)>& serve,
                    const std::function<void(worker_link&)>& work);

}  // namespace resnet50_ps
