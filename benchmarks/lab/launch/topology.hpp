// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lab {

/// Who is who among the ranks of a run. The workers stand in nodes, whose first one, the leader, talks to the server for
/// all of the node; in a flat parameter server every worker is a node of its own. Without a server, in an allreduce, rank
/// 0 is the first worker, keeps the records, and all are one node.
struct topology {
  bool has_server = true;
  std::vector<std::vector<std::size_t>> nodes;  ///< the ranks of each node's workers

  std::size_t ranks() const { return workers() + (has_server ? 1 : 0); }
  std::size_t workers() const;
  bool is_server(std::size_t rank) const { return has_server && rank == 0; }
  /// The number, from 0, of the worker on this rank.
  std::size_t worker_on(std::size_t rank) const { return has_server ? rank - 1 : rank; }
  std::size_t node_of(std::size_t rank) const;
  std::string name_of(std::size_t rank) const;
  /// The ranks that `rank` hears from: a server's clients, a leader's members, the others of an allreduce for worker 0.
  std::vector<std::size_t> below(std::size_t rank) const;
  /// And whom it answers to; of those that answer to nobody, itself.
  std::size_t above(std::size_t rank) const;
  /// All that it sends to or hears from, ascending: rank 0 hears of everybody, once, and without a server all do of all.
  std::vector<std::size_t> peers_of(std::size_t rank) const;
  /// For how many times as long as others `rank` waits for `awaited`, so that who is next to a silent rank is the first
  /// to say so: 1 for one with nobody below it, 2 for a leader, and more for those above.
  int patience(std::size_t rank, std::size_t awaited) const;
};

topology flat_topology(std::size_t workers);
/// `nodes[w]` names the node of worker w by any number; workers keep their order within it, nodes that of their leaders.
topology hybrid_topology(const std::vector<std::size_t>& nodes);
/// Nodes of so many workers in a row, the last one possibly smaller.
topology hybrid_topology(std::size_t workers, std::size_t workers_per_node);
topology allreduce_topology(std::size_t workers);

}  // namespace lab
