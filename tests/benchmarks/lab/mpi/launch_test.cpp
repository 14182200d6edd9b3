// SPDX-License-Identifier: MIT
// Who stands on which machine. MPI's profiling interface makes machines of two ranks each of the one that there is.
#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "catch.hpp"
#include "launch/launch_info.hpp"
#include "launch/topology.hpp"

using namespace lab;

extern "C" int MPI_Comm_split_type(MPI_Comm all, int type, int key, MPI_Info, MPI_Comm* machine) {
  if (type != MPI_COMM_TYPE_SHARED) return MPI_ERR_ARG;
  int rank = 0;
  PMPI_Comm_rank(all, &rank);
  return PMPI_Comm_split(all, rank / 2, key, machine);
}

TEST_CASE("mpi: nodes are the machines on which workers stand, where nobody says how many stand in one") {
  const launch_info here = find_launch_info();
  const std::vector<int> machines = {0, 0, 2, 2, 4};
  REQUIRE(here.machines == std::vector<int>(machines.begin(), machines.begin() + here.ranks));

  lab::options options;
  options.topology = "hybrid";
  const std::size_t workers = static_cast<std::size_t>(here.ranks) - 1;
  // Worker 0 shares the server's machine, 1 and 2 have one, and so has 3.
  std::vector<std::vector<std::size_t>> nodes = {{1}, {2, 3}, {4}};
  if (workers == 1) nodes = {{1}};
  if (workers == 2) nodes = {{1}, {2}};
  REQUIRE(find_topology(options, here).nodes == nodes);

  options.workers_per_node = 2;
  REQUIRE(find_topology(options, here).nodes[0].size() == std::min<std::size_t>(workers, 2));

  const topology flat = flat_topology(workers);
  REQUIRE(workers_here(flat, here, here.machines.size()) ==
          (here.rank < 2 ? 1U : std::min<std::size_t>(2, here.machines.size() - (here.rank < 4 ? 2U : 4U))));
}
