// SPDX-License-Identifier: MIT
#include "launch/launch_info.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

#include "messages/mpi_session.hpp"

namespace lab {
namespace {

// Over MPI the ranks are the server, where there is one, and the workers; in one process, a single rank plays them all.
std::size_t worker_count(const lab::options& options, const launch_info& here) {
  if (options.transport == "inprocess") {
    if (here.ranks > 1) {
      throw std::invalid_argument(
          fmt::format("--transport inprocess needs one process, but mpirun started {}", here.ranks));
    }
    return options.workers.value_or(2);
  }
  const int servers = needs_server(options) ? 1 : 0;
  if (here.ranks < 1 + servers) {
    throw std::invalid_argument(
        "one rank alone cannot train: rank 0 is the server, so start at least two, as in mpirun -n 3 "
        "lab, or play them all in this one with --transport inprocess");
  }
  const auto workers = static_cast<std::size_t>(here.ranks - servers);
  if (options.workers && *options.workers != workers) {
    throw std::invalid_argument(
        fmt::format("--workers {} needs {} ranks, but mpirun started {}", *options.workers,
                    *options.workers + static_cast<std::size_t>(servers), here.ranks));
  }
  return workers;
}

}  // namespace

launch_info find_launch_info() {
  launch_info here;
  MPI_Comm machine = MPI_COMM_NULL;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &here.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &here.ranks), "MPI_Comm_size");
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine),
            "MPI_Comm_split_type");
  int first = here.rank;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, machine), "MPI_Allreduce");
  here.machines.resize(static_cast<std::size_t>(here.ranks));
  check_mpi(MPI_Allgather(&first, 1, MPI_INT, here.machines.data(), 1, MPI_INT, MPI_COMM_WORLD),
            "MPI_Allgather");
  check_mpi(MPI_Comm_free(&machine), "MPI_Comm_free");
  return here;
}

topology find_topology(const lab::options& options, const launch_info& here) {
  const std::size_t workers = worker_count(options, here);
  if (!needs_server(options)) return allreduce_topology(workers);
  if (options.topology == "ps") return flat_topology(workers);
  if (options.workers_per_node) return hybrid_topology(workers, *options.workers_per_node);
  if (options.transport == "inprocess") return hybrid_topology(workers, workers);
  return hybrid_topology(std::vector<std::size_t>(here.machines.begin() + 1, here.machines.end()));
}

std::size_t workers_here(const topology& ranks, const launch_info& here, std::size_t end) {
  std::size_t workers = 0;
  for (std::size_t rank = 0; rank < end; ++rank) {
    const bool is_here = here.machines[rank] == here.machines[here.this_rank()];
    workers += is_here && !ranks.is_server(rank) ? 1 : 0;
  }
  return workers;
}

int thread_count(const lab::options& options, const topology& ranks, const launch_info& here) {
  if (options.threads > 0) return options.threads;
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (options.transport == "inprocess") return cores;  // one works at a time
  // The server works while its workers wait and the other way round, so it does not count.
  if (ranks.is_server(here.this_rank())) return 1;
  return std::max(1, cores / static_cast<int>(workers_here(ranks, here, here.machines.size())));
}

bool all_succeed(const launch_info& here, const std::function<void()>& prepare) {
  std::string problem;
  try {
    prepare();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  int first_failed = problem.empty() ? here.ranks : here.rank;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &first_failed, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD), "MPI_Allreduce");
  if (first_failed == here.rank) fmt::print(stderr, "lab: {}\n", problem);
  return first_failed == here.ranks;
}

std::optional<int> first_exit_code(const parsed& command, const launch_info& here) {
  int first = command.exit_code ? here.rank : here.ranks;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD), "MPI_Allreduce");
  if (first == here.ranks) return std::nullopt;
  int code = command.exit_code.value_or(EXIT_FAILURE);
  check_mpi(MPI_Bcast(&code, 1, MPI_INT, first, MPI_COMM_WORLD), "MPI_Bcast");
  if (first == here.rank) fmt::print(code == 0 ? stdout : stderr, "{}", command.message);
  return code;
}

}  // namespace lab
