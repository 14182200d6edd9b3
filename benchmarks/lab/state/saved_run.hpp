// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <lamina/layout.hpp>
#include <span>
#include <string>
#include <vector>

#include "data/batches.hpp"
#include "launch/training.hpp"
#include "loops/server.hpp"
#include "model/replica.hpp"

/// What a checkpoint of a run holds; checkpoint.hpp has the file.
namespace lab {

/// Where the run writes; empty if it writes nothing.
std::string directory_of(const training& run);

/// All that decides what a run computes, but for its workers and for how they exchange gradients, as a text that says where two of them
/// differ.
std::string configuration_of(const training& run, const lamina::layout& model);
/// How workers exchange gradients: what decides the order of additions.
std::string exchange_of(const training& run);
/// How many workers, in which nodes.
std::string workers_of(const topology& ranks);

/// Of a worker, beside its compressor: where it is in its data, and the running statistics of batch normalisation.
std::vector<std::byte> save_worker(const replica& local, const batch_stream& batches);
/// Takes the statistics up. Throws std::runtime_error for bytes of another model, or of a worker with another number of
/// threads, which round otherwise.
batch_stream::position load_worker(std::span<const std::byte> bytes, replica& local);

/// The states, as save_state() makes them, that so many workers begin with in place of those that were saved: all get the
/// mean of the residuals and of the statistics, and begin in the data where as many images have been seen by all. Errors as
/// lamina::merge_states, and std::runtime_error for states of another model.
std::vector<std::vector<std::byte>> merge_workers(const std::vector<std::vector<std::byte>>& states,
                                                  std::size_t workers, const replica& local);

/// Whether the run's directory holds any.
bool has_checkpoints(const training& run);
/// The newest good checkpoint of the run, or the beginning if there is none: reads the parameters into the replica. Throws
/// std::runtime_error if it is of a run with another configuration, of another exchange unless the run changes it, beyond the steps asked
/// for, or of other workers unless the run merges their residuals. A plan comes with the same exchange alone.
server_state load_checkpoint(const training& run, const replica& local);
void save_checkpoint(const training& run, const replica& local, const server_state& state);

}  // namespace lab
