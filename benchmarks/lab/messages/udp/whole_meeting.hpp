// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "messages/transport.hpp"
#include "messages/udp/address.hpp"
#include "messages/udp/udp_socket.hpp"
#include "messages/udp/udp_transport.hpp"

namespace lab {

/// All ranks meet: by MPI, once, and from then on they talk by sockets alone. They wait for each other for twice a timeout.
///
/// \param ranks    all of them call this
/// \param how      but for the secret, which rank 0 draws
/// \param paths    this rank's addresses, one a path; all ranks have as many
/// \param sockets  of packets
/// \throws link_error, peers_lost  naming who did not come, or differs
std::unique_ptr<transport> meet_over_udp(MPI_Comm ranks, udp_transport_options how,
                                         const std::vector<endpoint>& paths,
                                         const udp_socket_options& sockets);

}  // namespace lab
