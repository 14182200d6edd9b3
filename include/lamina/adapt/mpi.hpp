// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/frame.hpp"

/// Frames and bytes over MPI.
///
/// A message is its length and then the bytes, in pieces of 1 MiB that MPI reads where the segments lie: one datatype of all segments is
/// as quick on idle cores and many times slower on busy ones, and counts of MPI are ints. While nothing moves these functions sleep
/// between looks, where MPI_Send and MPI_Recv take a whole core from the computation on the same machine.
///
/// Messages between two ranks with one tag arrive in order; both sides use these functions. `tag` and `comm` are as of MPI_Send, and
/// `patience` is how long nothing may move: then timeout_error names the rank. MPI's errors end the program, as is MPI's default, or throw
/// std::runtime_error where the communicator returns them. Not for several threads without MPI_THREAD_MULTIPLE.
namespace lamina::inline LAMINA_ABI::mpi {

/// A message has not moved for as long as the caller had patience. MPI still holds its memory, so the one way on is to end the run, as by
/// MPI_Abort.
class timeout_error : public std::runtime_error {
 public:
  timeout_error(int rank, const std::string& sentence) : std::runtime_error(sentence), rank_(rank) {}
  /// The rank that was waited for, in the communicator of the call; MPI_ANY_SOURCE if that was any.
  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// Patience without an end: a century.
inline constexpr std::chrono::milliseconds for_ever = std::chrono::hours(24 * 365 * 100);

}  // namespace lamina::inline LAMINA_ABI::mpi

namespace lamina::inline LAMINA_ABI::detail {

inline std::string mpi_text(int code) {
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  text.resize(static_cast<std::size_t>(length));
  return text;
}
inline void check_mpi(int code, const char* call) {
  if (code != MPI_SUCCESS) refuse<std::runtime_error>(call, ": ", mpi_text(code));
}

/// What goes on between two looks at MPI, which moves data on only when it is called.
class mpi_wait {
 public:
  /// `what` is the beginning of the error's sentence, as "nothing came from".
  mpi_wait(const char* what, std::chrono::milliseconds patience) : what_(what), patience_(patience) {}
  /// Sleeps, unless the look before saw something move. Throws timeout_error, naming the rank, at the end of patience.
  void after_look(bool has_moved, int rank) {
    const auto now = std::chrono::steady_clock::now();
    if (has_moved) {
      moved_at_ = now;
      nap_ = shortest_nap;
      return;
    }
    if (now - moved_at_ > patience_) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience_).count();
      const std::string who = rank == MPI_ANY_SOURCE ? "any rank" : "rank " + std::to_string(rank);
      raise(mpi::timeout_error(rank,
                               std::string(what_) + ' ' + who + " for " + std::to_string(seconds) + " s"));
    }
    std::this_thread::sleep_for(nap_);
    nap_ = (std::min)(2 * nap_, longest_nap);
  }

 private:
  static constexpr std::chrono::microseconds shortest_nap{5};
  static constexpr std::chrono::microseconds longest_nap{200};
  const char* what_;
  std::chrono::milliseconds patience_;
  std::chrono::microseconds nap_ = shortest_nap;
  std::chrono::steady_clock::time_point moved_at_ = std::chrono::steady_clock::now();
};

inline constexpr std::size_t mpi_piece_bytes = std::size_t{1} << 20;

/// Posts `pieces` pieces to or from each of the ranks, by `post(rank, index, request)`, until all of them have gone, or have come.
template <class Post>
void mpi_move(std::span<const int> ranks, std::size_t pieces, mpi_wait wait, const Post& post) {
  constexpr std::size_t most_in_flight = 8;  // keeps a link busy, and is soon looked through
  struct stream {
    std::size_t posted = 0;
    std::vector<MPI_Request> requests = {};  // in flight
  };
  std::vector<stream> streams(ranks.size());
  for (;;) {
    bool has_moved = false;
    const int* open = nullptr;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      auto& [posted, requests] = streams[i];
      if (!requests.empty()) {
        int count = 0;
        int indices[most_in_flight];
        check_mpi(MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count, indices,
                               MPI_STATUSES_IGNORE),
                  "MPI_Testsome");
        std::erase(requests, MPI_REQUEST_NULL);
        has_moved |= count != MPI_UNDEFINED && count > 0;
      }
      for (; posted < pieces && requests.size() < most_in_flight; ++posted)
        check_mpi(post(ranks[i], posted, &requests.emplace_back()), "a message over MPI");
      if (!requests.empty()) open = &ranks[i];
    }
    if (open == nullptr) return;
    wait.after_look(has_moved, *open);
  }
}

/// Bytes at several places as one message from MPI_BOTTOM.
inline MPI_Datatype mpi_type_of(std::span<const int> lengths, std::span<const MPI_Aint> addresses) {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  check_mpi(MPI_Type_create_hindexed(static_cast<int>(lengths.size()), lengths.data(), addresses.data(),
                                     MPI_BYTE, &type),
            "MPI_Type_create_hindexed");
  check_mpi(MPI_Type_commit(&type), "MPI_Type_commit");
  return type;
}

/// Segments in pieces that MPI can send from MPI_BOTTOM, of which each may lie in several segments.
inline std::vector<MPI_Datatype> mpi_pieces(std::span<const std::span<const std::byte>> segments) {
  std::vector<MPI_Datatype> pieces;
  std::vector<int> lengths;  // of the segments of a piece
  std::vector<MPI_Aint> addresses;
  std::size_t room = mpi_piece_bytes;
  const auto close_piece = [&] {
    pieces.push_back(mpi_type_of(lengths, addresses));
    lengths.clear();
    addresses.clear();
    room = mpi_piece_bytes;
  };
  for (auto rest : segments) {
    while (!rest.empty()) {
      const std::size_t taken = (std::min)(room, rest.size());
      lengths.push_back(static_cast<int>(taken));
      check_mpi(MPI_Get_address(rest.data(), &addresses.emplace_back()), "MPI_Get_address");
      rest = rest.subspan(taken);
      room -= taken;
      if (room == 0) close_piece();
    }
  }
  if (!lengths.empty()) close_piece();
  return pieces;
}

inline void mpi_send(std::span<const std::span<const std::byte>> segments, std::span<const int> ranks,
                     int tag, MPI_Comm comm, std::chrono::milliseconds patience) {
  std::vector<MPI_Datatype> pieces = mpi_pieces(segments);
  // What is given up stays where MPI may still read it.
  auto* const length = new std::uint64_t(0);
  for (const auto each : segments) *length += each.size();
  mpi_move(ranks, 1 + pieces.size(), {"nothing was taken by", patience},
           [&](int rank, std::size_t index, MPI_Request* request) {
             if (index == 0) return MPI_Isend(length, 1, MPI_UINT64_T, rank, tag, comm, request);
             return MPI_Isend(MPI_BOTTOM, 1, pieces[index - 1], rank, tag, comm, request);
           });
  for (MPI_Datatype& each : pieces) MPI_Type_free(&each);
  delete length;
}

}  // namespace lamina::inline LAMINA_ABI::detail

namespace lamina::inline LAMINA_ABI::mpi {

/// Sends a frame, of any size and without a copy, to each of these ranks of `comm` at the same time, each of which is named once. Returns
/// when MPI has taken all of it: the frame's memory may then change.
inline void send(const encoded_frame& frame, std::span<const int> ranks, int tag, MPI_Comm comm,
                 std::chrono::milliseconds patience = for_ever) {
  detail::mpi_send(frame.segments(), ranks, tag, comm, patience);
}
/// The same of other bytes.
inline void send(std::span<const std::byte> bytes, std::span<const int> ranks, int tag, MPI_Comm comm,
                 std::chrono::milliseconds patience = for_ever) {
  detail::mpi_send({&bytes, 1}, ranks, tag, comm, patience);
}
/// The same of either to one rank.
template <class Message>
void send(const Message& message, int rank, int tag, MPI_Comm comm,
          std::chrono::milliseconds patience = for_ever) {
  send(message, std::span<const int>(&rank, 1), tag, comm, patience);
}

/// Waits until a message has come, which receive() then takes. `rank` may be MPI_ANY_SOURCE; gives whose message it is.
inline int wait_for_message(int rank, int tag, MPI_Comm comm, std::chrono::milliseconds patience = for_ever) {
  detail::mpi_wait wait("nothing came from", patience);
  for (;;) {
    int is_there = 0;
    MPI_Status status;
    detail::check_mpi(MPI_Iprobe(rank, tag, comm, &is_there, &status), "MPI_Iprobe");
    if (is_there != 0) return status.MPI_SOURCE;
    wait.after_look(false, rank);
  }
}

/// Receives a message of one rank into `bytes`, whose memory is used again where it suffices.
inline void receive(std::vector<std::byte>& bytes, int rank, int tag, MPI_Comm comm,
                    std::chrono::milliseconds patience = for_ever) {
  wait_for_message(rank, tag, comm, patience);
  std::uint64_t length = 0;
  detail::check_mpi(MPI_Recv(&length, 1, MPI_UINT64_T, rank, tag, comm, MPI_STATUS_IGNORE), "MPI_Recv");
  bytes.resize(length);
  constexpr std::size_t piece_bytes = detail::mpi_piece_bytes;
  // What is given up stays where MPI may still write.
  auto* const into = new std::vector<std::byte>(std::move(bytes));
  detail::mpi_move({&rank, 1}, length / piece_bytes + (length % piece_bytes != 0),
                   {"nothing came from", patience}, [&](int from, std::size_t index, MPI_Request* request) {
                     const std::size_t begin = index * piece_bytes;
                     return MPI_Irecv(into->data() + begin,
                                      static_cast<int>((std::min)(piece_bytes, into->size() - begin)),
                                      MPI_BYTE, from, tag, comm, request);
                   });
  bytes = std::move(*into);
  delete into;
}
/// The same into memory of its own, aligned for decode().
[[nodiscard]] inline std::vector<std::byte> receive(int rank, int tag, MPI_Comm comm,
                                                    std::chrono::milliseconds patience = for_ever) {
  std::vector<std::byte> bytes;
  receive(bytes, rank, tag, comm, patience);
  return bytes;
}

}  // namespace lamina::inline LAMINA_ABI::mpi
