// SPDX-License-Identifier: MIT
// Trains a network for an experiment: with a parameter server, or with sums that overlap with backward. One run, whose steps rank 0 writes to
// standard output, a line of JSON each. Started by mpirun; see --help.
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <lamina/error.hpp>
#include <memory>
#include <string>

#include "messages/mpi_session.hpp"
#include "training.hpp"

namespace lab {
namespace {

void train(const options& how) {
  const std::chrono::seconds timeout(how.timeout_seconds);
  work_clock clock;
  mpi_ranks all(MPI_COMM_WORLD, timeout, clock);
  training run(how, all, clock);
  if (how.topology == "allreduce") return train_by_sums(run);
  if (how.topology == "mpi_allreduce") return train_plainly(run);
  std::unique_ptr<way> over;
  const auto name_of = [&](std::size_t rank) { return run.name_of_caller(rank); };
  if (run.callers && how.is_lossy()) {
    over = way_over_udp(run.callers->communicator(), frame_grid(run.local.model(), run.losses()),
                        run.sockets(), timeout, name_of);
  } else if (run.callers) {
    over = way_over_mpi(run.callers->communicator(), timeout);
  }
  if (run.is_server) return serve(run, *over);
  work(run, over.get());
}

// Says why and ends the other ranks too, which may wait for this one for ever.
[[noreturn]] void end_all_ranks(const std::exception& error) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const bool has_diverged = dynamic_cast<const lamina::non_finite_gradient*>(&error) != nullptr;
  std::fprintf(stderr, "lab: rank %d: %s%s\n", rank, error.what(),
               has_diverged ? "; training has diverged, try a lower --learning-rate" : "");
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  std::abort();
}

}  // namespace
}  // namespace lab

int main(int argc, char** argv) {
  lab::options how;
  CLI::App app(
      "Trains a network for an experiment: with a parameter server, or with sums that overlap with "
      "backward.");
  add_options(app, how);
  CLI11_PARSE(app, argc, argv);
  if (const std::string mistake = mistake_in(how); !mistake.empty()) {
    std::fprintf(stderr, "lab: %s\n", mistake.c_str());
    return EXIT_FAILURE;
  }
  try {
    // Collectives during the computation have a thread that calls MPI as well.
    const lab::mpi_session session(argc, argv,
                                   how.topology == "allreduce" ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED);
    try {
      torch::set_num_threads(how.threads);
      if (!how.replay.empty()) how.no_evaluation = true;  // what is replayed trains nothing
      lab::train(how);
    } catch (const std::exception& error) {
      lab::end_all_ranks(error);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lab: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
