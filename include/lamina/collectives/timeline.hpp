// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "lamina/collectives/schedule.hpp"
#include "lamina/detail/abi.hpp"

/// \file
/// What happened when: a record that an engine writes into. Read it before engine.hpp.
namespace lamina::inline LAMINA_ABI::collectives {

/// What an event is of.
enum class activity : std::uint8_t {
  computation,  ///< of the caller: forward, backward, an update
  ready,        ///< a layer was handed over
  waiting,      ///< the caller waits for a layer: exposed communication
  collective,
};

enum class event_kind : std::uint8_t { begin, end, instant };

/// Something that happened.
struct event {
  activity what = activity::computation;
  event_kind kind = event_kind::instant;
  std::uint64_t step = 0;
  std::size_t index = 0;    ///< of the layer, or of the bucket of a collective
  std::uint64_t bytes = 0;  ///< of a collective
  algorithm how = algorithm::pairwise;
  operation moves = operation::all_reduce;  ///< of a collective
  std::chrono::nanoseconds at{0};           ///< since the timeline was made
};

/// The last events of a run, in the order in which they happened. For any thread. No allocation after it is made.
class timeline {
 public:
  /// Throws std::invalid_argument for no events.
  explicit timeline(std::size_t most_events)
      : events_(most_events), start_(std::chrono::steady_clock::now()) {
    if (most_events == 0) throw std::invalid_argument("a timeline without room for an event");
  }

  /// Adds it with the time of now; the oldest makes room.
  void record(event happened) {
    const std::lock_guard lock(mutex_);
    happened.at = std::chrono::steady_clock::now() - start_;
    events_[recorded_++ % events_.size()] = happened;
  }

  /// Oldest first.
  [[nodiscard]] std::vector<event> events() const {
    const std::lock_guard lock(mutex_);
    std::vector<event> ordered;
    const std::size_t first = recorded_ > events_.size() ? recorded_ - events_.size() : 0;
    for (std::size_t i = first; i < recorded_; ++i) ordered.push_back(events_[i % events_.size()]);
    return ordered;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<event> events_;
  std::size_t recorded_ = 0;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace lamina::inline LAMINA_ABI::collectives
