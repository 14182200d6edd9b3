// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "messages/transport.hpp"

/// How a message goes over MPI: an announcement, and the bytes behind it in pieces.
namespace lab {

/// Goes ahead of a message's bytes.
struct mpi_announcement {
  message_kind kind = message_kind::sign_of_life;
  std::uint64_t piece_bytes = 0;
  std::uint64_t bytes = 0;
};

inline constexpr int mpi_announcement_tag = 1;
inline constexpr int mpi_piece_tag = 2;
/// MPI 3.1 counts in int, so long messages must go in pieces; these are small enough to show that a slow one moves.
inline constexpr std::size_t mpi_piece_bytes = std::size_t{1} << 20;
/// Of a message to the rank from which one comes at the same time. Open MPI halves the rate of both where they are above its eager limit:
/// docs/decisions/0020-pieces-and-both-ways.md.
inline constexpr std::size_t mpi_exchanged_piece_bytes = 60'000;

/// What a look at MPI has shown: nothing is on its way; something is; some of it has come or gone since the last look; all of it has.
enum class mpi_progress { none, moving, advanced, done };

/// How many requests have completed since the last look; those that have are MPI_REQUEST_NULL. Throws link_error.
int complete_some(std::vector<MPI_Request>& requests);

/// One message on its way to one or more ranks. Shares the memory of what it sends, and makes the datatypes of its pieces once for all
/// receivers.
///
/// These get it one after the other: who has it first computes and answers while others get theirs. All at once would have it at the
/// end, and answer at once. Who takes none of it for 100 ms holds up the others by that while, once. See
/// docs/decisions/0034-one-receiver-after-the-other.md. Errors of MPI are link_error.
class mpi_outgoing {
 public:
  mpi_outgoing(MPI_Comm communicator, std::span<const std::size_t> to, message_kind kind, payload what,
               std::size_t piece_bytes = mpi_piece_bytes);
  mpi_outgoing(const mpi_outgoing&) = delete;
  mpi_outgoing& operator=(const mpi_outgoing&) = delete;
  ~mpi_outgoing();

  /// Looks at MPI, and posts what may go. Never none.
  mpi_progress advance();
  /// Those whose turn is still to come.
  std::vector<std::size_t> waiting() const;
  bool is_sent_to(std::size_t rank) const;
  /// The ranks that have not taken all of it.
  std::vector<std::size_t> missing() const;
  /// Whether MPI may still look at its memory.
  bool is_in_flight();

 private:
  class piece_type;
  struct receiver {
    std::size_t rank = 0;
    std::size_t posted = 0;                  // pieces
    std::vector<MPI_Request> requests = {};  // on their way, the announcement first
    std::chrono::steady_clock::time_point advanced_at = {};
  };

  bool is_sent(const receiver& to) const;
  void begin_next();
  void post_pieces(receiver& to);
  std::size_t pieces_in_flight() const;

  MPI_Comm communicator_;
  mpi_announcement announced_;
  payload what_;
  std::deque<piece_type> pieces_;
  std::vector<receiver> receivers_;
  std::size_t begun_ = 0;  // of the receivers
};

}  // namespace lab
