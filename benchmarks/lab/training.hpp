// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/worker.hpp>
#include <optional>
#include <string>
#include <vector>

#include "clock.hpp"
#include "mpi_ranks.hpp"
#include "options.hpp"
#include "replica.hpp"
#include "resnet50_ps/data.hpp"

namespace lab {

/// What a worker tells of a step. Goes from rank to rank as it lies.
struct step_report {
  double loss = 0;    ///< mean over its batch
  double images = 0;  ///< of the batch; 0: of the server
  double compute_seconds =
      0;  ///< from the parameters' arrival to the frame that is ready to send, without evaluations
  double node_seconds = 0;  ///< of sums within its node, and of handing parameters on
  double sent_bytes = 0;    ///< of gradients; in an all-reduce each way
  double is_sender = 0;     ///< 1; 0 of those whose node sends for them
};

/// What a step is to rank 0 only.
struct step_traffic {
  std::uint64_t bytes_down = 0;  ///< of all frames of parameters; in an all-reduce what the reports say
  std::size_t receivers = 0;     ///< of these; 0: as many as send
  std::optional<double> lost_up{};
  double exposed_seconds = -1;  ///< in which the computation waited for collectives; below 0: not known
  double hidden_seconds = 0;    ///< of collectives during the computation
};

/// Throws std::runtime_error, which says that training has diverged.
[[noreturn]] void refuse_gradient(const lamina::layout& model, std::size_t layer);

/// One run as one rank sees it.
class training {
 public:
  /// The ranks of `all`, which reach `how.steps` together. Throws std::invalid_argument for options that these ranks cannot have.
  training(const options& how, mpi_ranks& all, work_clock& clock);

  const options& how;
  mpi_ranks& all;
  work_clock& clock;
  replica local;
  bool is_server;
  std::optional<mpi_ranks> workers;  ///< without the server; none there
  std::optional<mpi_ranks> node;  ///< with whom this worker adds gradients up; none where it is the only one
  std::optional<mpi_ranks> senders;  ///< who send to the server: of each node the first
  std::optional<mpi_ranks> callers;  ///< the server and these, in their order

  /// Fills the gradients of the replica, and the report on the batch.
  std::function<void(std::uint64_t step, step_report&)> compute;

  std::size_t workers_in_all() const { return all.size() - (how.has_server() ? 1 : 0); }
  std::size_t clients() const { return workers_in_all() / how.workers_per_node; }
  /// Of a rank of `all`, and of one of `callers`.
  std::string name_of(std::size_t rank) const;
  std::string name_of_caller(std::size_t rank) const {
    return name_of(rank == 0 ? 0 : 1 + (rank - 1) * how.workers_per_node);
  }
  float learning_rate(std::uint64_t step) const;
  lamina::worker_options compression() const;
  bool is_over(std::uint64_t step) const { return step > how.steps; }

  /// All ranks call it after the last step, with the parameters in their replicas, which are compared; batch-norm statistics become their
  /// mean over the workers, and the network is evaluated. Throws std::runtime_error, naming the rank, for another replica.
  void examine();
  /// All ranks call it at the end of `step`. Rank 0 writes a line of JSON to standard output.
  void log(std::uint64_t step, const step_report& report, const step_traffic& traffic = {});

 private:
  void average_statistics();
  // The share of the test images whose class came first.
  double evaluate();

  data_sets data_;
  stopwatch since_last_;  // step that was logged
};

/// The loops. Each returns when all steps are done, and throws std::runtime_error or lamina's errors.
void serve(training& run, way& clients);
/// `server` is null where another worker of the node speaks with it.
void work(training& run, way* server);
/// Gradients are summed by lamina's collectives, after the backward pass or during it.
void train_by_sums(training& run);
/// By MPI_Allreduce in buckets of 25 MiB, to compare with.
void train_plainly(training& run);

}  // namespace lab
