// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "data/batches.hpp"
#include "messages/report.hpp"
#include "model/replica.hpp"

/// What a replica computes of images.
namespace lab {

/// Fills the gradients of the replica's parameters, and the report on the batch.
void compute_gradients(replica& local, const batch_stream::batch& batch, step_report& report);

/// How many rows of `logits` (N x classes) have the target class among their `first` largest.
std::uint64_t correct_within(std::int64_t first, const torch::Tensor& logits, const torch::Tensor& target);

/// The running statistics of batch normalisation, which are local to a worker while it trains, become their mean over the
/// workers. All of them call it; `average` takes the mean.
void average_statistics(replica& local, const std::function<void(std::span<double>)>& average);

/// Evaluates the replica on one worker's share of the images and sets the report's counts. `show_life` is called after each
/// batch.
void evaluate(replica& local, const std::shared_ptr<image_set>& images, shard part, std::size_t batch_images,
              const std::function<void()>& show_life, step_report& report);

}  // namespace lab
