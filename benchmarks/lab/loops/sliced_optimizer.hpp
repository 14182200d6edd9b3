// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/collectives/schedule.hpp>
#include <lamina/layout.hpp>
#include <span>
#include <vector>

#include "messages/worker_group.hpp"
#include "model/optimizer.hpp"

namespace lab {

/// Of each layer, the elements that one worker updates.
using owned_ranges = std::vector<lamina::collectives::element_range>;

/// The optimizer of a worker that updates a slice of each layer, or all of it: sgd with velocity of these elements alone. Two threads may
/// update two layers at once.
class sliced_optimizer {
 public:
  /// Throws std::invalid_argument as sgd.
  sliced_optimizer(const lamina::layout& model, owned_ranges own, const sgd_options& options);

  void set_learning_rate(float rate) { own_.set_learning_rate(rate); }
  /// Applies the gradient of this worker's elements of a layer to them. Errors as sgd.
  void update(std::size_t layer, std::uint64_t step, std::span<const float> gradient,
              std::span<float> parameters);

  /// Takes the elements that are this worker's out of a state of all, as state_of() makes them. Throws link_error for that of another
  /// optimizer.
  void take_up(std::span<const std::byte> state);
  /// The state of all on worker 0, as state_of() makes it of an optimizer that updates everything; nothing on others. All call it.
  /// `share_of(worker)` is what each of them adds to it: ranges of its own elements, which together are all.
  std::vector<std::byte> gather(worker_group& group,
                                const std::function<owned_ranges(std::size_t worker)>& share_of) const;

 private:
  lamina::layout model_;
  owned_ranges ranges_;
  sgd_options options_;
  sgd own_;  // of the ranges alone
};

}  // namespace lab
