// SPDX-License-Identifier: MIT
#pragma once

#include "launch/training.hpp"
#include "messages/transport.hpp"
#include "model/replica.hpp"
#include "records/run_log.hpp"

namespace lab {

/// Runs the loop that belongs to the rank at this end. All end when training is over; rank 0 has the result. Errors as serve()
/// and work().
run_result train(transport& ranks, const training& run, replica& local);

}  // namespace lab
