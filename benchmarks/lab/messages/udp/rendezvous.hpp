// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

#include "messages/transport.hpp"
#include "messages/udp/opened.hpp"

namespace lab {

/// What all ranks know when they have met.
struct rendezvous {
  std::uint64_t secret = 0;
  std::vector<rank_addresses> ranks;
};
/// Once, by all ranks of the communicator: everybody's addresses, and a secret that rank 0 has from the system. Throws link_error;
/// naming the rank, where some have other numbers of paths.
rendezvous exchange_addresses(MPI_Comm communicator, const rank_addresses& mine, const rank_names& name_of);

}  // namespace lab
