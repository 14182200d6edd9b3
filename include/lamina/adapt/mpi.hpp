// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/frame.hpp"

/// Frames and bytes over MPI.
///
/// A message is its length and then the bytes, in pieces of 1 MiB that MPI reads where the segments lie: one datatype of all segments is
/// as quick on idle cores and many times slower on busy ones, and counts of MPI are ints. While nothing moves these functions sleep
/// between looks, where MPI_Send and MPI_Recv take a whole core from the computation on the same machine.
///
/// Messages between two ranks with one tag arrive in order; both sides use these functions. MPI's errors end the program, as is MPI's
/// default, or throw std::runtime_error where the communicator returns them. Not for several threads without MPI_THREAD_MULTIPLE.
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

inline void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  text.resize(static_cast<std::size_t>(length));
  raise(std::runtime_error(std::string(call) + ": " + text));
}

/// What goes on between two looks at MPI, which moves data on only when it is called.
class mpi_wait {
 public:
  explicit mpi_wait(std::chrono::milliseconds patience) : patience_(patience) {}
  /// \param has_moved  whether the look before saw something move
  /// \return           whether patience has come to its end
  bool is_over(bool has_moved) {
    const auto now = std::chrono::steady_clock::now();
    if (has_moved) {
      moved_at_ = now;
      nap_ = shortest_nap;
      return false;
    }
    if (now - moved_at_ > patience_) return true;
    std::this_thread::sleep_for(nap_);
    nap_ = (std::min)(2 * nap_, longest_nap);
    return false;
  }

 private:
  static constexpr std::chrono::microseconds shortest_nap{5};
  static constexpr std::chrono::microseconds longest_nap{200};
  std::chrono::milliseconds patience_;
  std::chrono::microseconds nap_ = shortest_nap;
  std::chrono::steady_clock::time_point moved_at_ = std::chrono::steady_clock::now();
};

[[noreturn]] inline void mpi_lost(int rank, const char* what, std::chrono::milliseconds patience) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience).count();
  const std::string who = rank == MPI_ANY_SOURCE ? "any rank" : "rank " + std::to_string(rank);
  raise(mpi::timeout_error(rank, std::string(what) + ' ' + who + " for " + std::to_string(seconds) + " s"));
}

/// The pieces of one message, to or from one rank.
struct mpi_stream {
  static constexpr std::size_t piece_bytes = std::size_t{1} << 20;
  static constexpr std::size_t most_in_flight = 8;  // keeps a link busy, and is soon looked through

  int rank;
  std::size_t pieces;
  std::size_t posted = 0;
  std::vector<MPI_Request> requests = {};  // in flight

  bool has_moved() {
    int count = 0;
    int indices[most_in_flight];
    check_mpi(MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count, indices,
                           MPI_STATUSES_IGNORE),
              "MPI_Testsome");
    std::erase(requests, MPI_REQUEST_NULL);
    return count != MPI_UNDEFINED && count > 0;
  }
};

/// Posts pieces by `post(rank, index, request)` until all of them have gone, or have come.
template <class Post>
void mpi_move(std::vector<mpi_stream>& streams, const char* doing, std::chrono::milliseconds patience,
              Post post) {
  mpi_wait wait(patience);
  for (;;) {
    bool has_moved = false;
    const mpi_stream* open = nullptr;
    for (mpi_stream& each : streams) {
      if (!each.requests.empty()) has_moved |= each.has_moved();
      for (; each.posted < each.pieces && each.requests.size() < mpi_stream::most_in_flight; ++each.posted)
        check_mpi(post(each.rank, each.posted, &each.requests.emplace_back()), "a message over MPI");
      if (!each.requests.empty()) open = &each;
    }
    if (open == nullptr) return;
    if (wait.is_over(has_moved)) mpi_lost(open->rank, doing, patience);
  }
}

/// Segments as what MPI sends: the length, then pieces, of which one that lies in several segments is a datatype.
class mpi_message {
 public:
  explicit mpi_message(std::span<const std::span<const std::byte>> segments) {
    std::vector<std::span<const std::byte>> piece;
    std::size_t room = mpi_stream::piece_bytes;
    for (auto rest : segments) {
      length_ += rest.size();
      while (!rest.empty()) {
        piece.push_back(rest.first((std::min)(room, rest.size())));
        room -= piece.back().size();
        rest = rest.subspan(piece.back().size());
        if (room == 0) add(piece, room);
      }
    }
    if (!piece.empty()) add(piece, room);
  }
  ~mpi_message() {
    for (MPI_Datatype& each : types_) MPI_Type_free(&each);
  }
  mpi_message(const mpi_message&) = delete;
  mpi_message& operator=(const mpi_message&) = delete;

  [[nodiscard]] std::size_t pieces() const noexcept { return 1 + types_.size(); }
  int post(std::size_t index, int rank, int tag, MPI_Comm comm, MPI_Request* request) const {
    if (index == 0) return MPI_Isend(&length_, 1, MPI_UINT64_T, rank, tag, comm, request);
    return MPI_Isend(MPI_BOTTOM, 1, types_[index - 1], rank, tag, comm, request);
  }

 private:
  void add(std::vector<std::span<const std::byte>>& piece, std::size_t& room) {
    std::vector<int> lengths;
    std::vector<MPI_Aint> addresses(piece.size());
    for (std::size_t i = 0; i < piece.size(); ++i) {
      lengths.push_back(static_cast<int>(piece[i].size()));
      check_mpi(MPI_Get_address(piece[i].data(), &addresses[i]), "MPI_Get_address");
    }
    MPI_Datatype type = MPI_DATATYPE_NULL;
    check_mpi(MPI_Type_create_hindexed(static_cast<int>(piece.size()), lengths.data(), addresses.data(),
                                       MPI_BYTE, &type),
              "MPI_Type_create_hindexed");
    types_.push_back(type);
    check_mpi(MPI_Type_commit(&types_.back()), "MPI_Type_commit");
    piece.clear();
    room = mpi_stream::piece_bytes;
  }

  std::uint64_t length_ = 0;
  std::vector<MPI_Datatype> types_;
};

inline void mpi_send(std::span<const std::span<const std::byte>> segments, std::span<const int> ranks,
                     int tag, MPI_Comm comm, std::chrono::milliseconds patience) {
  auto message = std::make_unique<const mpi_message>(segments);
  std::vector<mpi_stream> streams;
  for (const int rank : ranks) streams.push_back({.rank = rank, .pieces = message->pieces()});
  // What is given up stays where MPI may still read it.
  const mpi_message& sent = *message.release();
  mpi_move(streams, "nothing was taken by", patience, [&](int rank, std::size_t index, MPI_Request* request) {
    return sent.post(index, rank, tag, comm, request);
  });
  delete &sent;
}

}  // namespace lamina::inline LAMINA_ABI::detail

namespace lamina::inline LAMINA_ABI::mpi {

/// Sends a frame, without a copy, to each of these ranks at the same time. Returns when MPI has taken all of it: the frame's memory may
/// then change.
///
/// \param frame     a whole frame, of any size
/// \param ranks     of `comm`, each once
/// \param tag       as of MPI_Send
/// \param comm      where the ranks are
/// \param patience  how long nothing may move
/// \throws timeout_error  naming the rank that took nothing for so long
inline void send(const encoded_frame& frame, std::span<const int> ranks, int tag, MPI_Comm comm,
                 std::chrono::milliseconds patience = for_ever) {
  detail::mpi_send(frame.segments(), ranks, tag, comm, patience);
}
/// The same to one rank.
inline void send(const encoded_frame& frame, int rank, int tag, MPI_Comm comm,
                 std::chrono::milliseconds patience = for_ever) {
  detail::mpi_send(frame.segments(), {&rank, 1}, tag, comm, patience);
}
/// The same of other bytes.
inline void send(std::span<const std::byte> bytes, std::span<const int> ranks, int tag, MPI_Comm comm,
                 std::chrono::milliseconds patience = for_ever) {
  detail::mpi_send({&bytes, 1}, ranks, tag, comm, patience);
}
inline void send(std::span<const std::byte> bytes, int rank, int tag, MPI_Comm comm,
                 std::chrono::milliseconds patience = for_ever) {
  detail::mpi_send({&bytes, 1}, {&rank, 1}, tag, comm, patience);
}

/// Waits until a message has come, which receive() then takes. `rank` may be MPI_ANY_SOURCE.
/// \return whose message it is
/// \throws timeout_error  naming the rank
inline int wait_for_message(int rank, int tag, MPI_Comm comm, std::chrono::milliseconds patience = for_ever) {
  detail::mpi_wait wait(patience);
  for (;;) {
    int is_there = 0;
    MPI_Status status;
    detail::check_mpi(MPI_Iprobe(rank, tag, comm, &is_there, &status), "MPI_Iprobe");
    if (is_there != 0) return status.MPI_SOURCE;
    if (wait.is_over(false)) detail::mpi_lost(rank, "nothing came from", patience);
  }
}

/// Receives a message of one rank into `bytes`, whose memory is used again where it suffices.
/// \throws timeout_error  naming the rank, from which nothing came for so long
inline void receive(std::vector<std::byte>& bytes, int rank, int tag, MPI_Comm comm,
                    std::chrono::milliseconds patience = for_ever) {
  wait_for_message(rank, tag, comm, patience);
  std::uint64_t length = 0;
  detail::check_mpi(MPI_Recv(&length, 1, MPI_UINT64_T, rank, tag, comm, MPI_STATUS_IGNORE), "MPI_Recv");
  bytes.resize(length);
  constexpr std::size_t piece_bytes = detail::mpi_stream::piece_bytes;
  std::vector<detail::mpi_stream> stream{
      {.rank = rank, .pieces = length / piece_bytes + (length % piece_bytes != 0)}};
  // What is given up stays where MPI may still write.
  auto* into = new std::vector<std::byte>(std::move(bytes));
  detail::mpi_move(stream, "nothing came from", patience,
                   [&](int from, std::size_t index, MPI_Request* request) {
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
