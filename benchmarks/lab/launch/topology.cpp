// SPDX-License-Identifier: MIT
#include "launch/topology.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>

namespace lab {

std::size_t topology::workers() const {
  std::size_t sum = 0;
  for (const auto& node : nodes) sum += node.size();
  return sum;
}

std::size_t topology::node_of(std::size_t rank) const {
  const auto found = std::ranges::find_if(
      nodes, [&](const auto& node) { return std::ranges::find(node, rank) != node.end(); });
  if (found == nodes.end()) throw std::out_of_range("rank " + std::to_string(rank) + " is no worker");
  return static_cast<std::size_t>(found - nodes.begin());
}

std::string topology::name_of(std::size_t rank) const {
  return is_server(rank) ? "the server" : "worker " + std::to_string(worker_on(rank));
}

std::vector<std::size_t> topology::below(std::size_t rank) const {
  std::vector<std::size_t> ranks;
  if (is_server(rank)) {
    for (const auto& node : nodes) ranks.push_back(node.front());
  } else if (const auto& node = nodes[node_of(rank)]; node.front() == rank) {
    ranks.assign(node.begin() + 1, node.end());
  }
  return ranks;
}

std::size_t topology::above(std::size_t rank) const {
  if (rank == 0) return rank;
  const std::size_t leader = nodes[node_of(rank)].front();
  return leader == rank ? 0 : leader;
}

std::vector<std::size_t> topology::peers_of(std::size_t rank) const {
  std::vector<std::size_t> peers = below(rank);
  if (rank == 0 || !has_server) {
    peers.resize(ranks());
    std::iota(peers.begin(), peers.end(), std::size_t{0});
    peers.erase(peers.begin() + static_cast<std::ptrdiff_t>(rank));
    return peers;
  }
  peers.push_back(0);
  if (above(rank) != 0) peers.push_back(above(rank));
  std::ranges::sort(peers);
  return peers;
}

int topology::patience(std::size_t rank, std::size_t awaited) const {
  const std::vector<std::size_t> heard = below(rank);
  if (std::ranges::find(heard, awaited) != heard.end()) return below(awaited).empty() ? 1 : 2;
  if (!has_server) return 2;
  // As long as the longest wait that the one above may be in, and once more.
  return above(rank) == 0 ? (below(rank).empty() && nodes.size() == workers() ? 2 : 3) : 4;
}

topology flat_topology(std::size_t workers) {
  return hybrid_topology(workers, 1);
}

topology hybrid_topology(const std::vector<std::size_t>& nodes) {
  topology who;
  std::map<std::size_t, std::size_t> places;
  for (std::size_t w = 0; w < nodes.size(); ++w) {
    const auto [place, is_new] = places.try_emplace(nodes[w], who.nodes.size());
    if (is_new) who.nodes.emplace_back();
    who.nodes[place->second].push_back(w + 1);
  }
  return who;
}

topology hybrid_topology(std::size_t workers, std::size_t workers_per_node) {
  std::vector<std::size_t> nodes(workers);
  for (std::size_t w = 0; w < workers; ++w) nodes[w] = w / workers_per_node;
  return hybrid_topology(nodes);
}

topology allreduce_topology(std::size_t workers) {
  topology who{.has_server = false, .nodes = {std::vector<std::size_t>(workers)}};
  std::iota(who.nodes[0].begin(), who.nodes[0].end(), std::size_t{0});
  return who;
}

}  // namespace lab
