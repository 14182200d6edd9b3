// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <lamina/adapt/mpi.hpp>
#include <span>
#include <string>
#include <vector>

/// What a message between two ranks is.
enum tag : int { parameters_tag, report_tag, values_tag, agreed_tag, gradients_tag, state_tag };

inline std::string name_of(int rank) { return rank == 0 ? "the server" : "worker " + std::to_string(rank); }

/// Who is who. Rank 0 is the server, all others are workers. The workers of a node sum their gradients, and the first of them, its
/// leader, exchanges with the server. A worker for itself is the leader of a node of one.
struct ranks {
  int rank = 0;
  int workers = 0;                // ranks 1 to this
  int leader = 0;                 // of this rank's node
  MPI_Comm all = MPI_COMM_NULL;   // of all workers
  MPI_Comm node = MPI_COMM_NULL;  // of the workers of this rank's node
  std::vector<int> leaders;       // of all nodes: to lamina, leaders[s] is sender s
  std::vector<int> all_workers;
  std::vector<std::vector<int>> nodes;   // of each leader: all workers of its node, itself the first
  std::chrono::milliseconds patience{};  // of this rank with the one that it waits for

  /// Collective. `per_node` as --workers-per-node.
  ranks(int per_node, std::chrono::seconds timeout) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &workers);
    std::vector<int> leader_of(static_cast<std::size_t>(workers--));
    MPI_Comm_split(MPI_COMM_WORLD, is_server() ? MPI_UNDEFINED : 0, rank, &all);
    if (!is_server() && per_node == 0)
      MPI_Comm_split_type(all, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
    else if (!is_server())
      MPI_Comm_split(all, (rank - 1) / per_node, rank, &node);
    leader = rank;
    if (!is_server()) MPI_Bcast(&leader, 1, MPI_INT, 0, node);
    MPI_Allgather(&leader, 1, MPI_INT, leader_of.data(), 1, MPI_INT, MPI_COMM_WORLD);
    for (int r = 1; r <= workers; ++r) {
      all_workers.push_back(r);
      const int its_leader = leader_of[static_cast<std::size_t>(r)];
      if (its_leader == r) leaders.push_back(r), nodes.emplace_back();
      nodes[sender(its_leader)].push_back(r);  // a leader is the first of its node
    }
    // The server is the first to lose its patience: it knows best for whom everybody waits.
    patience = is_server() ? timeout : is_leader() ? 2 * timeout : 3 * timeout;
  }

  /// lamina's messages with these ranks' patience: to a rank or several, and from one.
  template <class What, class To>
  void send(const What& what, const To& to, tag kind) const {
    lamina::mpi::send(what, to, kind, MPI_COMM_WORLD, patience);
  }
  std::vector<std::byte> receive(int from, tag kind) const { return lamina::mpi::receive(from, kind, MPI_COMM_WORLD, patience); }

  bool is_server() const { return rank == 0; }
  bool is_leader() const { return rank == leader && !is_server(); }
  /// The index among the senders, of a leader.
  std::size_t sender(int of_leader) const { return static_cast<std::size_t>(std::ranges::find(leaders, of_leader) - leaders.begin()); }
};

/// What each worker tells the server in each step before gradients are exchanged: the server so knows who has not come that far.
struct report {
  double loss = 0;       // mean of the batch; where several reports are one, a sum over the workers, as what follows
  double test_loss = 0;  // of the parameters before the step: a sum over the images tested, if there was a test
  double test_right = 0;
  double tested = 0;
  double test_seconds = 0;  // of the slowest worker, as the next
  double compute_seconds = 0;
  std::uint64_t checksum = 0;  // of the parameters, after the last step
};

/// Adds the reports of these workers to `sum`. Throws std::runtime_error where their parameters differ.
inline void add_reports(report& sum, std::span<const int> workers, const ranks& who) {
  for (const int worker : workers) {
    report told;
    std::memcpy(&told, who.receive(worker, report_tag).data(), sizeof told);
    if (sum.checksum != 0 && told.checksum != sum.checksum)
      throw std::runtime_error("the parameters of " + name_of(worker) + " differ from the others'");
    sum = {.loss = sum.loss + told.loss,
           .test_loss = sum.test_loss + told.test_loss,
           .test_right = sum.test_right + told.test_right,
           .tested = sum.tested + told.tested,
           .test_seconds = std::max(sum.test_seconds, told.test_seconds),
           .compute_seconds = std::max(sum.compute_seconds, told.compute_seconds),
           .checksum = told.checksum};
  }
}
