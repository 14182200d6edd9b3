// SPDX-License-Identifier: MIT
#include "messages/udp/rendezvous.hpp"

#include <string>
#include <type_traits>

#include "messages/mpi_session.hpp"

namespace lab {

rendezvous exchange_addresses(MPI_Comm communicator, const rank_addresses& mine, const rank_names& name_of) {
  static_assert(std::is_trivially_copyable_v<rank_addresses>);
  int rank = 0;
  int ranks = 0;
  check_mpi(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(communicator, &ranks), "MPI_Comm_size");
  rendezvous met;
  met.ranks.resize(static_cast<std::size_t>(ranks));
  if (rank == 0) met.secret = make_secret();
  check_mpi(MPI_Bcast(&met.secret, 1, MPI_UINT64_T, 0, communicator), "MPI_Bcast");
  check_mpi(
      MPI_Allgather(&mine, sizeof mine, MPI_BYTE, met.ranks.data(), sizeof mine, MPI_BYTE, communicator),
      "MPI_Allgather");
  for (std::size_t r = 0; r < met.ranks.size(); ++r) {
    const rank_addresses& theirs = met.ranks[r];
    if (theirs.paths == met.ranks[0].paths && theirs.control.is_v6 == met.ranks[0].control.is_v6) continue;
    throw link_error("--interface: " + name_of(r) + " has " + std::to_string(theirs.paths) + " paths of IPv" +
                     (theirs.control.is_v6 != 0 ? "6" : "4") + ", " + name_of(0) + " has " +
                     std::to_string(met.ranks[0].paths) + " of IPv" +
                     (met.ranks[0].control.is_v6 != 0 ? "6" : "4"));
  }
  return met;
}

}  // namespace lab
