// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/collectives/plan.hpp"
#include "lamina/detail/finite.hpp"

/// How long steps take by a plan's costs, where sums go on beside the computation.
namespace lab {

using lamina::collectives::plan;
using lamina::collectives::task;

/// A step that waits for nothing: seconds after its beginning.
struct step_times {
  std::vector<double> needed;  ///< of each layer, when the forward pass reads it
  std::vector<double> ready;   ///< of each layer, when its gradient is complete
  double seconds = 0;          ///< of the whole step
};

/// Where a step waits for what the step before has summed.
enum class waits : std::uint8_t {
  at_the_end,      ///< for all of it, when backward has ended
  in_the_forward,  ///< for each layer, where the next forward pass reads it; for the rest before the first gradient is handed over
};

/// What steps wait in the long run, where every layer is sent. Steps follow one another: each begins where the one before it ends, and what
/// it waits puts off all that comes after. Its collectives run one after the other, each as soon as the one before it is done and all
/// layers of its bucket are ready.
class step_prediction {
 public:
  /// \param of     buckets and costs; it outlives this
  /// \param tasks  of a step, in order: of.tasks(), or of.tasks_of_owners() with owners
  step_prediction(const plan& of, std::span<const task> tasks) : of_(of), tasks_(tasks.begin(), tasks.end()) {
    for (const task& each : tasks_) seconds_.push_back(seconds_of(each));
  }

  /// Seconds for which each step waits. Throws std::invalid_argument for another number of layers, for times below 0 or not finite, and
  /// where a layer is needed or ready after the end. Cost: 128 steps of L layers, and two allocations. Of steps that do not settle, the
  /// mean of the last ones.
  [[nodiscard]] double exposed(const step_times& alone, waits where) const {
    check_times("needed", alone.needed, alone.seconds);
    check_times("ready", alone.ready, alone.seconds);
    constexpr int settling = 64;
    constexpr int counted = 64;
    link under_way = {std::vector<double>(of_.buckets().size()), 0};
    for (int step = 0; step < settling; ++step) wait(alone, where, under_way);
    double sum = 0;
    for (int step = 0; step < counted; ++step) sum += wait(alone, where, under_way);
    return sum / counted;
  }

 private:
  // After the beginning of the step. Before the first one nothing is under way.
  struct link {
    std::vector<double> done;  // of each bucket of the step before
    double is_free;
  };

  // Half of an all_reduce takes half its time.
  [[nodiscard]] double seconds_of(const task& which) const {
    const double both = of_.seconds_of(of_.buckets()[which.bucket]);
    return which.what == lamina::collectives::operation::all_reduce ? both : both / 2;
  }

  // What one step waits, and what is under way when it ends.
  double wait(const step_times& alone, waits where, link& under_way) const {
    double late = 0;
    if (where == waits::in_the_forward) {
      double first_ready = alone.seconds;
      for (std::size_t l = 0; l < alone.needed.size(); ++l) {
        late = (std::max)(late, under_way.done[of_.place(l).bucket] - alone.needed[l]);
        first_ready = (std::min)(first_ready, alone.ready[l]);
      }
      late = (std::max)(late, under_way.is_free - first_ready);
    }
    double now = under_way.is_free;
    for (std::size_t k = 0; k < tasks_.size(); ++k) {
      const std::size_t bucket = tasks_[k].bucket;
      for (const std::size_t l : of_.buckets()[bucket].layers) now = (std::max)(now, alone.ready[l] + late);
      now += seconds_[k];
      under_way.done[bucket] = now;
    }
    double end = alone.seconds + late;
    if (where == waits::at_the_end) end = (std::max)(end, now);
    // After the beginning of the next step.
    for (double& each : under_way.done) each -= end;
    under_way.is_free = now - end;
    return end - alone.seconds;
  }

  void check_times(const char* what, std::span<const double> times, double end) const {
    if (!lamina::detail::is_finite(end))
      throw std::invalid_argument("a step cannot take " + std::to_string(end) + " s");
    if (times.size() != of_.model().layers()) {
      throw std::invalid_argument("there are " + std::to_string(times.size()) + " times for " +
                                  std::to_string(of_.model().layers()) + " layers");
    }
    const auto bad = std::ranges::find_if(
        times, [&](double each) { return !lamina::detail::is_finite(each) || each < 0 || each > end; });
    if (bad == times.end()) return;
    throw std::invalid_argument("layer '" + of_.model()[static_cast<std::size_t>(bad - times.begin())].name +
                                "' cannot be " + what + " after " + std::to_string(*bad) +
                                " s of a step of " + std::to_string(end) + " s");
  }

  const plan& of_;
  std::vector<task> tasks_;
  std::vector<double> seconds_;  // of each
};

}  // namespace lab
