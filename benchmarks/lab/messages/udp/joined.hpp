// SPDX-License-Identifier: MIT
#pragma once

#include <memory>
#include <span>

#include "messages/udp/opened.hpp"
#include "messages/udp/udp_transport.hpp"

namespace lab {

/// This rank meets its peers, and from then on they talk by sockets alone. They wait for each other for twice a timeout.
///
/// \param here  what this rank has opened
/// \param all   where every rank is to be found
/// \param how   of the run, with its secret
/// \throws link_error, peers_lost  naming who did not come, or differs
std::unique_ptr<udp_transport> join_over_udp(open_sockets here, std::span<const rank_addresses> all,
                                             udp_transport_options how);

}  // namespace lab
