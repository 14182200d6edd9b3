// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <lamina/adapt/mpi.hpp>
#include <span>
#include <string>
#include <vector>

/// What a message between two ranks is.
enum tag : int { parameters_tag, report_tag, values_tag, agreed_tag, gradients_tag, state_tag };

inline std::string name_of(int rank) {
  return rank == 0 ? "the server" : "worker " + std::to_string(rank);
}

/// Who is who. Rank 0 is the server, all others are workers. The workers of a node sum their gradients, and the first of them, its
/// leader, exchanges with the server. A worker for itself is the leader of a node of one.
struct ranks {
  int rank = 0;
  int workers = 0;  // ranks 1 to this
  int leader = 0;   // of this rank's node
  MPI_Comm node = MPI_COMM_NULL;
  std::vector<int> leaders;              // of all nodes: to lamina, leaders[s] is sender s
  std::vector<std::vector<int>> nodes;   // of each leader: all workers of its node, itself the first
  std::chrono::milliseconds patience{};  // of this rank with the one that it waits for

  /// Collective. `per_node` as --workers-per-node.
  ranks(int per_node, std::chrono::seconds timeout) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &workers);
    std::vector<int> leader_of(static_cast<std::size_t>(workers--));
    MPI_Comm all_workers = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, is_server() ? MPI_UNDEFINED : 0, rank, &all_workers);
    if (!is_server() && per_node == 0)
      MPI_Comm_split_type(all_workers, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
    else if (!is_server())
      MPI_Comm_split(all_workers, (rank - 1) / per_node, rank, &node);
    leader = rank;
    if (!is_server()) MPI_Bcast(&leader, 1, MPI_INT, 0, node);
    MPI_Allgather(&leader, 1, MPI_INT, leader_of.data(), 1, MPI_INT, MPI_COMM_WORLD);
    for (int r = 1; r <= workers; ++r) {
      if (leader_of[static_cast<std::size_t>(r)] == r) leaders.push_back(r);
    }
    for (const int each : leaders) {
      nodes.emplace_back();
      for (int r = 1; r <= workers; ++r) {
        if (leader_of[static_cast<std::size_t>(r)] == each) nodes.back().push_back(r);
      }
    }
    // The server is the first to lose its patience: it knows best for whom everybody waits.
    patience = is_server() ? timeout : is_leader() ? 2 * timeout : 3 * timeout;
  }

  bool is_server() const { return rank == 0; }
  bool is_leader() const { return rank == leader && !is_server(); }
  /// The index among the senders, of a leader.
  std::size_t sender(int of_leader) const {
    return static_cast<std::size_t>(std::ranges::find(leaders, of_leader) - leaders.begin());
  }
  /// The others of this leader's node.
  std::span<const int> members() const { return std::span(nodes[sender(rank)]).subspan(1); }
};

/// What each worker tells the server in each step, before it exchanges gradients: the server then knows who has not come so far.
struct report {
  double loss = 0;  // mean of the batch
  double compute_seconds = 0;
  double test_seconds = 0;
  double test_loss = 0;  // a sum over the images tested before the step, if there was a test
  std::int64_t test_right = 0;
  std::int64_t tested = 0;
  std::uint64_t checksum = 0;  // of the parameters, after the last step
};

inline void send_report(const report& told, const ranks& who) {
  lamina::mpi::send(std::as_bytes(std::span(&told, 1)), 0, report_tag, MPI_COMM_WORLD, who.patience);
}
inline report receive_report(int from, const ranks& who) {
  const auto bytes = lamina::mpi::receive(from, report_tag, MPI_COMM_WORLD, who.patience);
  report told;
  std::memcpy(&told, bytes.data(), sizeof told);
  return told;
}
