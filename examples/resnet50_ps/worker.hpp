// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <functional>
#include <lamina/worker.hpp>

#include "batches.hpp"
#include "replica.hpp"
#include "transport.hpp"

namespace resnet50_ps {

struct worker_options {
  std::uint64_t steps = 0;
  lamina::compressor_options compression;
};

/// Runs one worker for `steps` steps: takes the parameters into the replica, computes the gradients of a
/// batch, sends the layers that layer dropping selects. `pulled` is called each time new parameters stand in
/// the replica, `steps` + 1 times in all. Throws lamina::decode_error for a bad frame,
/// lamina::non_finite_gradient when training diverges, mpi_error for a lost server.
void work(transport& link, replica& local, const std::function<batch_stream::batch()>& next_batch,
          const worker_options& options, const std::function<void(std::uint64_t step)>& pulled = {});

/// Correct predictions of the replica over the images, in evaluation mode.
std::uint64_t count_correct(replica& local, const std::shared_ptr<image_set>& images, shard part,
                            std::size_t batch_images);

/// Replaces the running statistics of batch normalisation by their mean over the workers: they are local to a
/// worker while it trains.
void average_running_statistics(transport& link, replica& local);

}  // namespace resnet50_ps
