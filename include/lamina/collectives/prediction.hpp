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
#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"

/// How long steps take by a plan's costs, where sums go on beside the computation.
namespace lamina::inline LAMINA_ABI::collectives {

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

/// Seconds for which each step waits, in the long run, where every layer is sent. Steps follow one another, each begins where the one
/// before it ends, and what a step waits puts off all that comes after it. The collectives of a step run one after the other, each as soon
/// as the one before it is done and all layers of its bucket are ready.
/// \param of     buckets and costs
/// \param tasks  of a step, in order: of.tasks(), or of.tasks_of_owners() with owners
/// \param alone  the step without any wait
/// Throws std::invalid_argument for another number of layers, for times below 0 or not finite, and where a layer is ready after the
/// end. Cost: some hundred steps of L layers. Of steps that do not settle, the mean of the last ones.
[[nodiscard]] inline double predicted_exposed(const plan& of, std::span<const task> tasks,
                                              const step_times& alone, waits where);

namespace detail {

/// One step after another.
class predicted_steps {
 public:
  predicted_steps(const plan& of, std::span<const task> tasks, const step_times& alone)
      : of_(of), tasks_(tasks), alone_(alone), done_(of.buckets().size()) {
    check("needed", alone.needed);
    check("ready", alone.ready);
    for (const double each : alone.ready) first_ready_ = std::min(first_ready_, each);
  }

  /// What the next step waits.
  double next(waits where) {
    double late = 0;
    if (where == waits::in_the_forward) {
      for (std::size_t l = 0; l < alone_.needed.size(); ++l)
        late = std::max(late, done_[of_.place(l).bucket] - alone_.needed[l]);
      late = std::max(late, link_is_free_ - first_ready_);
    }
    double now = link_is_free_;
    for (const task& each : tasks_) {
      for (const std::size_t l : of_.buckets()[each.bucket].layers)
        now = std::max(now, alone_.ready[l] + late);
      now += of_.seconds_of(each);
      done_[each.bucket] = now;
    }
    double end = alone_.seconds + late;
    if (where == waits::at_the_end) end = std::max(end, now);
    // From the beginning of the next step.
    for (double& each : done_) each -= end;
    link_is_free_ = now - end;
    return end - alone_.seconds;
  }

 private:
  void check(const char* what, std::span<const double> times) const {
    if (times.size() != of_.model().layers()) {
      throw std::invalid_argument("there are " + std::to_string(times.size()) + " times for " +
                                  std::to_string(of_.model().layers()) + " layers");
    }
    const auto bad = std::ranges::find_if(times, [&](double each) {
      return !lamina::detail::is_finite(each) || each < 0 || !(each <= alone_.seconds);
    });
    if (bad == times.end()) return;
    throw std::invalid_argument("layer '" + of_.model()[static_cast<std::size_t>(bad - times.begin())].name +
                                "' cannot be " + what + " after " + std::to_string(*bad) +
                                " s of a step of " + std::to_string(alone_.seconds) + " s");
  }

  const plan& of_;
  std::span<const task> tasks_;
  const step_times& alone_;
  double first_ready_ = alone_.seconds;
  // From the beginning of the step; of the first, nothing is under way.
  std::vector<double> done_;
  double link_is_free_ = 0;
};

}  // namespace detail

inline double predicted_exposed(const plan& of, std::span<const task> tasks, const step_times& alone,
                                waits where) {
  if (!lamina::detail::is_finite(alone.seconds))
    throw std::invalid_argument("a step cannot take " + std::to_string(alone.seconds) + " s");
  constexpr int settling = 64;
  constexpr int counted = 64;
  detail::predicted_steps steps(of, tasks, alone);
  for (int step = 0; step < settling; ++step) steps.next(where);
  double sum = 0;
  for (int step = 0; step < counted; ++step) sum += steps.next(where);
  return sum / counted;
}

}  // namespace lamina::inline LAMINA_ABI::collectives
