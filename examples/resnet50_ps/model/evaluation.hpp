// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <memory>

#include "data/batches.hpp"
#include "messages/link.hpp"
#include "model/replica.hpp"

namespace resnet50_ps {

/// How many rows of `logits` (N x classes) have the target class among their `first` largest.
std::uint64_t correct_within(std::int64_t first, const torch::Tensor& logits, const torch::Tensor& target);

/// The running statistics of batch normalisation, which are local to a worker while it trains, become their mean over the
/// workers. All of them call it.
void average_statistics(worker_peers& peers, replica& local);

/// Evaluates the replica on one worker's share of the images and sets the report's counts. All workers call it:
/// their statistics are averaged first.
void evaluate(worker_peers& peers, replica& local, const std::shared_ptr<image_set>& images,
              std::size_t batch_images, step_report& report);

}  // namespace resnet50_ps
