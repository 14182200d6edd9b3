// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <cstddef>
#include <functional>
#include <lamina/layout.hpp>
#include <lamina/udp/address.hpp>
#include <optional>
#include <string>
#include <vector>

#include "data/data.hpp"
#include "launch/options.hpp"
#include "launch/topology.hpp"
#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "messages/lossy_way.hpp"
#include "model/replica.hpp"

namespace lab {

/// Fills the gradients of a replica, and the report on the batch.
using gradient_source = std::function<void(std::uint64_t step, replica& local, step_report& report)>;

/// What an experiment adds to the program; benchmarks/network has one. Each may be empty.
struct experiment {
  /// Its own options; see parse_options().
  option_hook add_options;
  /// Once they are known: what it changes in the others.
  std::function<void(options&)> adjust;
  /// What a worker has its gradients of, where `compute` computes them.
  std::function<gradient_source(const lab::options& options, std::size_t worker,
                                const lamina::layout& model, gradient_source compute)>
      gradients;
  /// See server_tasks.
  std::function<void(double server_seconds)> updated;
};

/// One training run from beginning to end: what the command line says, with or without layer dropping.
struct training {
  lab::options options;
  data_sets data;
  lab::topology topology;
  std::size_t place_on_machine = 0;        ///< of this rank, among the workers there
  MPI_Comm communicator = MPI_COMM_WORLD;  ///< of its ranks, unless they are all in this process
  lamina::udp::rank_addresses paths = {};  ///< local addresses of this rank's packets, with --transport udp alone
  bool layer_dropping = true;
  experiment added = {};

  bool is_plain() const { return options.topology == "mpi_allreduce"; }
  std::string name() const {
    if (is_plain()) return "plain MPI_Allreduce";
    return layer_dropping ? "with layer dropping" : "without layer dropping";
  }
};

/// The run to compare with: the same workers, without a server and without lamina.
training plain_run(const training& compared);

/// The network as the seed makes it, or --load, for the server and each worker alike, there on the device that the options
/// want. Throws as load_model().
replica make_replica(const training& run, bool is_worker);

/// No message of the run is longer: bounds what a peer may announce.
std::size_t largest_message_bytes(const training& run, const replica& local);

/// The network of a run in one process that loses packets; none: it loses nothing.
std::optional<lossy_options> network_of(const training& run);
lamina::bounded::stop_policy stop_of(const lab::options& options);
/// What goes to the server.
lamina::frame_kind frames_up(const lab::options& options);

/// What the options mean to the loops.
training_plan plan_of(const training& run, std::uint64_t steps_done);
server_options server_options_of(const training& run, std::uint64_t steps_done);
worker_options worker_options_of(const training& run, std::size_t sender, std::uint64_t steps_done);

/// Throws std::invalid_argument, naming it, for an option that cannot be meant, before any time is spent.
void check_training(const training& run, bool is_worker);
/// The same for the output directory: one that --resume finds no checkpoint in, or that holds those of an earlier run.
void check_output(const training& run);

}  // namespace lab
