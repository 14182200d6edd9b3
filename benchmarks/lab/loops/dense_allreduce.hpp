// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include "loops/allreduce.hpp"
#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "model/replica.hpp"

namespace lab {

/// What everybody does, to compare with: every gradient is summed by MPI_Allreduce, in buckets of 25 MiB as PyTorch's DDP does
/// it, and each worker applies the mean. No residual, no frame and no checksum. `workers` are the ranks of `group` in its order; all
/// begin with the parameters of worker 0, which keeps the records. Errors as train_by_allreduce(), and link_error with MPI's words.
void train_by_mpi_allreduce(worker_group& group, MPI_Comm workers, replica& local, const worker_tasks& tasks,
                            const worker_options& worker, const server_options& server,
                            const server_tasks& records);

}  // namespace lab
