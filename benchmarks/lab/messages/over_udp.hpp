// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/bounded/bounded.hpp>
#include <lamina/udp/udp.hpp>
#include <memory>
#include <string>
#include <vector>

#include "messages/interfaces.hpp"
#include "messages/transport.hpp"

/// The ranks of a run over lamina::udp: frames as packets, of which some may be lost, and all other messages over TCP.
namespace lab {

/// The frames of a run: how they are cut, and what of them may be lost.
struct frame_options {
  lamina::bounded::chunk_grid gradients;
  lamina::bounded::chunk_grid parameters;
  /// What each rank takes of gradients, if each takes a slice of them and nobody sends parameters; empty: one takes all.
  std::vector<lamina::bounded::chunk_grid> slices = {};
  lamina::frame_kind up = lamina::frame_kind::gradients;  ///< what goes to the server: gradients or updates
  std::uint32_t most_bound_up_ppm = 0;                    ///< of that
  std::uint32_t most_bound_down_ppm = 0;                  ///< of parameters
  lamina::bounded::stop_policy stop = lamina::bounded::stop_policy::eager;
  bool has_tags = true;  ///< packets have their class and precedence (DSCP); false: all are alike
};

struct udp_options {
  std::size_t rank = 0;
  std::size_t ranks = 0;
  bool takes_gradients = false;  ///< as the server does, or every rank its slices; all others take parameters
  std::vector<std::size_t> peers;  ///< the ranks that this one talks to
  frame_options frames;
  std::uint64_t link_bits = 0;  ///< a second, of each rank's link; 0: not known
  std::uint32_t senders = 1;    ///< ranks that send to the same one at the same time
  bool controls_rate = true;    ///< false: sends at the link's rate, whatever is lost
  std::size_t mtu = 1500;
  std::size_t max_message_bytes = 0;  ///< bounds what a peer may announce, and what waits of each
  std::function<std::chrono::seconds(std::size_t rank)> timeout_of;
  rank_names name_of;
};

/// All ranks meet: by MPI, once, and from then on they talk by sockets. They wait for each other for twice a timeout.
///
/// \param ranks    all of them call this
/// \param paths    this rank's addresses, one a path; all ranks have as many
/// \param sockets  of packets
/// \throws link_error, peers_lost  naming who did not come, or differs
std::unique_ptr<transport> meet_over_udp(MPI_Comm ranks, const udp_options& how,
                                         const lamina::udp::rank_addresses& paths,
                                         const lamina::udp::socket_options& sockets);

}  // namespace lab
