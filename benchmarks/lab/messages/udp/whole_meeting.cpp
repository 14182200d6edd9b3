// SPDX-License-Identifier: MIT
#include "messages/udp/whole_meeting.hpp"

#include <utility>

#include "messages/udp/joined.hpp"
#include "messages/udp/rendezvous.hpp"

namespace lab {

std::unique_ptr<transport> meet_over_udp(MPI_Comm ranks, udp_transport_options how,
                                         const std::vector<endpoint>& paths,
                                         const udp_socket_options& sockets) {
  open_sockets here = open_paths(paths, sockets);
  const rendezvous met = exchange_addresses(ranks, addresses_of(here), how.name_of);
  how.secret = met.secret;
  return join_over_udp(std::move(here), met.ranks, std::move(how));
}

}  // namespace lab
