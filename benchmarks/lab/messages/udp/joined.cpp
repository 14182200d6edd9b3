// SPDX-License-Identifier: MIT
#include "messages/udp/joined.hpp"

#include <algorithm>
#include <chrono>
#include <lamina/bounded/bounded.hpp>
#include <utility>
#include <vector>

#include "messages/udp/meeting.hpp"

namespace lab {
namespace {

lamina::bounded::hello_body hello_of(const udp_transport_options& how) {
  const lamina::bounded::chunk_grid& grid = how.frames.gradients;
  return {.rank = static_cast<std::uint32_t>(how.rank),
          .ranks = static_cast<std::uint32_t>(how.ranks),
          .element_type = 1,
          .payload_type = static_cast<std::uint8_t>(grid.type()),
          .fingerprint = grid.parts().fingerprint(),
          .chunk_elements = static_cast<std::uint32_t>(grid.chunk_elements()),
          .mtu = static_cast<std::uint32_t>(how.mtu)};
}

}  // namespace

std::unique_ptr<udp_transport> join_over_udp(open_sockets here, std::span<const rank_addresses> all,
                                             udp_transport_options how) {
  std::vector<endpoint> listeners;
  for (const rank_addresses& each : all) listeners.push_back(each.control);
  std::chrono::seconds longest{0};
  for (const std::size_t peer : how.peers) longest = std::max(longest, how.timeout_of(peer));
  std::vector<descriptor> connections = meet(here.control, how.peers, listeners,
                                             {.rank = how.rank,
                                              .hello = hello_of(how),
                                              .secret = how.secret,
                                              .name_of = how.name_of,
                                              .timeout = 2 * longest});
  std::vector<met_rank> peers;
  for (std::size_t i = 0; i < connections.size(); ++i) {
    const rank_addresses& theirs = all[how.peers[i]];
    const std::chrono::milliseconds timeout = how.timeout_of(how.peers[i]);
    set_control_options(connections[i].get(), static_cast<unsigned>(timeout.count()));
    peers.push_back({std::move(connections[i]), {theirs.data.begin(), theirs.data.begin() + theirs.paths}});
  }
  return std::make_unique<udp_transport>(std::move(how), std::move(here.paths), std::move(peers));
}

}  // namespace lab
