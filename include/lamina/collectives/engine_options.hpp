// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "lamina/collectives/executor.hpp"
#include "lamina/collectives/timeline.hpp"
#include "lamina/detail/abi.hpp"

/// \file
/// What an engine is told, and what it tells of its steps. Read it with engine.hpp.
namespace lamina::inline LAMINA_ABI::collectives {

/// Who moves messages on.
enum class progress_by : std::uint8_t {
  thread,  ///< one of the engine's own: communication goes on while the caller computes
  caller,  ///< ready(), wait(), drain() and poll(): for ranks that take turns in one thread, and where there is one core
};

/// Writes the new parameters of some elements of a layer over their mean gradient: those from `begin` on.
using owner_update = std::function<void(std::size_t layer, std::size_t begin, std::span<float> mean)>;

struct engine_options {
  piece_sizes pieces = {};
  progress_by progress = progress_by::thread;
  /// A rank that is not heard of for so long while a collective waits for it is an error; time in which it may compute counts. Time in
  /// which this rank does not look does not: between two looks 10 ms count at most.
  std::chrono::milliseconds timeout = std::chrono::minutes(2);
  timeline* record = nullptr;  ///< outlives the engine
  /// Each layer is cut into a slice for each rank, its owner. The owner alone gets the mean of its slice, and updates it, and the
  /// new parameters go to all ranks in place of the means: optimizer state is a P-th on each rank. Called by who moves messages on,
  /// with the slices of this rank of each bucket, in the order of the plan, once all of the bucket is summed; what it throws ends
  /// the engine. It must not call the engine, which is then refused with std::logic_error, and may read the parameters of its layer, which
  /// nobody writes meanwhile, but not those of others. Every rank has one, or none has. Without it the mean goes to all.
  owner_update update = {};
};

/// What the steps so far took.
struct engine_totals {
  std::uint64_t collectives = 0;
  std::uint64_t sent_bytes = 0;   ///< headers and all
  double waited_seconds = 0;      ///< in wait() and drain(): exposed communication
  double collective_seconds = 0;  ///< from begin to end of each: exposed or not
};

}  // namespace lamina::inline LAMINA_ABI::collectives
