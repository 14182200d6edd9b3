// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/aggregator.hpp>
#include <lamina/encoder.hpp>
#include <lamina/layout.hpp>
#include <lamina/outer_step.hpp>
#include <lamina/selection.hpp>
#include <span>
#include <vector>

#include "messages/worker_group.hpp"

namespace resnet50_ps {

/// The outer step of workers without a server: each owns a slice of every part and is its server. Updates go to their owners in
/// the payload that they were rounded to, are added up there as float in the order of the workers, and what the outer step makes of
/// the mean comes back in its own payload. So all hold what a server would have made, bit for bit, and 2 (W - 1) / W of a frame
/// moves in and out of each worker. Memory: the outer step's state of the slices owned, and the frames of one step.
class owned_slices {
 public:
  /// `parts` and `up` are the drift_compressor's parts and payload. The next step is `steps_done` + 1.
  owned_slices(worker_group& group, const lamina::layout& parts, lamina::payload_type up,
               const lamina::outer_options& options, std::uint64_t steps_done);

  /// What this worker's drift_compressor has packed in this step becomes what all subtract. The same parts are chosen by all: throws
  /// link_error that names a worker which has others. Gives the bytes sent, of which each way has half.
  std::size_t exchange(const lamina::selection& chosen, std::span<float> update);

  /// The state of the slices owned, for checkpoints; and back.
  lamina::outer_step<float>& outer() { return outer_; }

 private:
  // Calls `take(part, elements)` with the slice that a worker owns of each part chosen, unless it is empty.
  template <class Take>
  void for_each_slice(std::size_t owner, const lamina::selection& chosen, std::span<float> update,
                      Take take) const;
  std::vector<std::byte> frame_of(std::size_t owner, const lamina::selection& chosen, std::span<float> update,
                                  lamina::payload_type type) const;
  lamina::frame_view<float> read(std::span<const std::byte> bytes, std::size_t owner, std::size_t sender,
                                 const lamina::selection& chosen) const;

  worker_group& group_;
  std::vector<lamina::layout> slices_;  // of each worker
  lamina::payload_type up_;
  lamina::outer_step<float> outer_;
  lamina::gradient_aggregator<float> aggregator_;
};

}  // namespace resnet50_ps
