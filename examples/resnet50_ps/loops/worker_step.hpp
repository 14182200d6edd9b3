// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/worker.hpp>
#include <span>
#include <vector>

#include "loops/worker.hpp"
#include "messages/link.hpp"
#include "model/replica.hpp"

/// What the loops of all workers have in common.
namespace resnet50_ps {

/// Takes the parameters that `step` begins with into the replica.
void pull(worker_link& link, replica& local, std::uint64_t step);

/// The report of `step`, so far: the hash of the replica and its evaluation where they are due, and whether training is
/// over.
step_report report_on_replica(replica& local, std::uint64_t step, const worker_tasks& tasks,
                              const worker_options& options);

/// Fills the gradients of the replica's parameters.
void compute_gradients(replica& local, const batch_stream::batch& batch, step_report& report);

/// What a checkpoint holds of a worker: its compressor, if it has one, and what the tasks say; and back.
std::vector<std::byte> save_state(const lamina::gradient_compressor<float>* compressor,
                                  const worker_tasks& tasks);
void load_state(std::span<const std::byte> bytes, lamina::gradient_compressor<float>* compressor,
                const worker_tasks& tasks);

}  // namespace resnet50_ps
