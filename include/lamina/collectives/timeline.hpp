// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <ostream>
#include <span>
#include <stdexcept>
#include <vector>

#include "lamina/collectives/algorithm.hpp"
#include "lamina/collectives/cost.hpp"
#include "lamina/detail/abi.hpp"

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
  double predicted_seconds = 0;
  std::chrono::nanoseconds at{0};  ///< since the timeline was made
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

/// Writes events as Chrome trace JSON, for chrome://tracing or Perfetto: a process a rank, one track for computation and what it waits
/// for, one for collectives. Times are in microseconds.
inline void write_trace(std::ostream& to, std::span<const event> events, std::size_t rank) {
  constexpr std::array names = {"computation", "ready", "waiting", "collective"};
  constexpr std::array phases = {'B', 'E', 'i'};
  const char* separator = "";
  to << "{\"traceEvents\":[";
  for (const event& each : events) {
    std::array<char, 448> line{};
    std::snprintf(line.data(), line.size(),
                  "%s\n{\"name\":\"%s "
                  "%zu\",\"ph\":\"%c\",\"ts\":%lld.%03lld,\"pid\":%zu,\"tid\":%d,\"args\":{\"step\":%llu,"
                  "\"bytes\":%llu,\"operation\":\"%s\",\"algorithm\":\"%s\",\"predicted_seconds\":%s}}",
                  separator, names[static_cast<std::size_t>(each.what)], each.index,
                  phases[static_cast<std::size_t>(each.kind)], static_cast<long long>(each.at.count() / 1000),
                  static_cast<long long>(each.at.count() % 1000), rank,
                  each.what == activity::collective ? 1 : 0, static_cast<unsigned long long>(each.step),
                  static_cast<unsigned long long>(each.bytes),
                  each.what == activity::collective ? name_of(each.moves) : "",
                  each.what == activity::collective ? name_of(each.how) : "",
                  detail::scientific(each.predicted_seconds, 3).c_str());
    to << line.data();
    separator = ",";
  }
  to << "\n]}\n";
}

}  // namespace lamina::inline LAMINA_ABI::collectives
