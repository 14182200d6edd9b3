// SPDX-License-Identifier: MIT
#include "ways.hpp"

#include <algorithm>
#include <deque>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>

#include "clock.hpp"
#include "messages/mpi_session.hpp"
#include "messages/udp/whole_meeting.hpp"

namespace lab {
namespace {

constexpr int announcement_tag = 1;
constexpr int piece_tag = 2;
// MPI 3.1 counts in int, so long messages must go in pieces.
constexpr std::size_t piece_bytes = std::size_t{1} << 20;
constexpr std::size_t pieces_in_flight = 8;  // enough to keep a link busy

using segments = std::vector<std::span<const std::byte>>;

// The segments, cut wherever a piece is full.
std::vector<segments> pieces_of(byte_segments bytes) {
  std::vector<segments> pieces;
  std::size_t room = 0;
  for (auto rest : bytes) {
    while (!rest.empty()) {
      if (room == 0) {
        pieces.emplace_back();
        room = piece_bytes;
      }
      const std::size_t count = std::min(room, rest.size());
      pieces.back().push_back(rest.first(count));
      rest = rest.subspan(count);
      room -= count;
    }
  }
  return pieces;
}

// Segments anywhere in memory as one MPI message.
class piece_type {
 public:
  explicit piece_type(const segments& parts) {
    std::vector<int> lengths;
    std::vector<MPI_Aint> addresses;
    for (const auto part : parts) {
      lengths.push_back(static_cast<int>(part.size()));
      check_mpi(MPI_Get_address(part.data(), &addresses.emplace_back()), "MPI_Get_address");
    }
    check_mpi(MPI_Type_create_hindexed(static_cast<int>(parts.size()), lengths.data(), addresses.data(),
                                       MPI_BYTE, &type_),
              "MPI_Type_create_hindexed");
    check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  ~piece_type() { MPI_Type_free(&type_); }  // MPI keeps what a send on its way needs
  piece_type(const piece_type&) = delete;
  piece_type& operator=(const piece_type&) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

// Those that are over leave the list. Whether any is.
bool complete_some(std::vector<MPI_Request>& requests) {
  int count = 0;
  std::vector<int> indices(requests.size());
  check_mpi(MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count, indices.data(),
                         MPI_STATUSES_IGNORE),
            "MPI_Testsome");
  std::erase(requests, MPI_REQUEST_NULL);
  return count != MPI_UNDEFINED && count > 0;
}

class mpi_way final : public way {
 public:
  mpi_way(MPI_Comm ranks, std::size_t max_bytes, std::chrono::seconds timeout, rank_names name_of)
      : ranks_(ranks), max_bytes_(max_bytes), timeout_(timeout), name_of_(std::move(name_of)) {
    int size = 0;
    check_mpi(MPI_Comm_size(ranks_, &size), "MPI_Comm_size");
    buffers_.resize(static_cast<std::size_t>(size));
  }

  std::vector<sent_frame> send(std::span<const std::size_t> to, message_kind, const outgoing_frame& what,
                               std::span<const lamina::bounded::obligations>) override {
    std::deque<piece_type> pieces;
    for (const segments& each : pieces_of(what.frame.segments())) pieces.emplace_back(each);
    const std::uint64_t total = what.frame.size_bytes();
    std::vector<MPI_Request> requests;
    for (const std::size_t rank : to) {
      check_mpi(MPI_Isend(&total, sizeof total, MPI_BYTE, static_cast<int>(rank), announcement_tag, ranks_,
                          &requests.emplace_back(MPI_REQUEST_NULL)),
                "MPI_Isend");
      for (const piece_type& piece : pieces) {
        wait(requests, pieces_in_flight - 1, {&rank, 1}, "sending to");
        check_mpi(MPI_Isend(MPI_BOTTOM, 1, piece.get(), static_cast<int>(rank), piece_tag, ranks_,
                            &requests.emplace_back(MPI_REQUEST_NULL)),
                  "MPI_Isend");
      }
    }
    wait(requests, 0, to, "sending to");
    return std::vector<sent_frame>(to.size());
  }

  std::vector<message> receive(std::span<const std::size_t> from, message_kind kind) override {
    std::vector<std::uint64_t> announced(from.size());
    std::vector<std::vector<MPI_Request>> requests(from.size());
    for (std::size_t k = 0; k < from.size(); ++k)
      check_mpi(MPI_Irecv(&announced[k], sizeof announced[k], MPI_BYTE, static_cast<int>(from[k]),
                          announcement_tag, ranks_, &requests[k].emplace_back(MPI_REQUEST_NULL)),
                "MPI_Irecv");
    std::vector<bool> is_announced(from.size());
    patience waited(timeout_);
    for (bool are_done = false; !are_done;) {
      are_done = true;
      bool has_moved = false;
      for (std::size_t k = 0; k < from.size(); ++k) {
        has_moved = complete_some(requests[k]) || has_moved;
        if (requests[k].empty() && !is_announced[k]) {
          is_announced[k] = true;
          post(from[k], announced[k], requests[k]);
        }
        are_done = are_done && requests[k].empty();
      }
      if (!are_done && waited.is_over(has_moved)) {
        std::vector<std::size_t> silent;
        for (std::size_t k = 0; k < from.size(); ++k) {
          if (!requests[k].empty()) silent.push_back(from[k]);
        }
        lose(silent, "waiting for");
      }
    }
    std::vector<message> frames;
    for (std::size_t k = 0; k < from.size(); ++k)
      frames.push_back({.sender = k, .kind = kind, .bytes = buffers_[from[k]], .owner = {}});
    return frames;
  }

 private:
  // Sleeps longer and longer while nothing moves.
  class patience {
   public:
    explicit patience(std::chrono::seconds timeout) : timeout_(static_cast<double>(timeout.count())) {}
    bool is_over(bool has_moved) {
      if (has_moved) {
        since_ = {};
        nap_ = shortest_nap;
        return false;
      }
      std::this_thread::sleep_for(nap_);
      nap_ = std::min(2 * nap_, std::chrono::microseconds{200});
      return since_.seconds() > timeout_;
    }

   private:
    static constexpr std::chrono::microseconds shortest_nap{5};
    double timeout_;
    stopwatch since_;
    std::chrono::microseconds nap_ = shortest_nap;
  };

  void post(std::size_t rank, std::uint64_t total, std::vector<MPI_Request>& requests) {
    if (total > max_bytes_) {
      throw link_error(name_of_(rank) + " announces a frame of " + std::to_string(total) +
                       " bytes, more than the " + std::to_string(max_bytes_) + " that can be meant");
    }
    std::vector<std::byte>& into = buffers_[rank];
    into.resize(total);
    for (std::size_t begin = 0; begin < total; begin += piece_bytes)
      check_mpi(
          MPI_Irecv(into.data() + begin, static_cast<int>(std::min(piece_bytes, total - begin)), MPI_BYTE,
                    static_cast<int>(rank), piece_tag, ranks_, &requests.emplace_back(MPI_REQUEST_NULL)),
          "MPI_Irecv");
  }

  // Until no more than `most` are under way.
  void wait(std::vector<MPI_Request>& requests, std::size_t most, std::span<const std::size_t> whom,
            const std::string& doing) const {
    patience waited(timeout_);
    while (requests.size() > most) {
      if (!complete_some(requests) && waited.is_over(false)) lose(whom, doing);
    }
  }

  [[noreturn]] void lose(std::span<const std::size_t> ranks, const std::string& doing) const {
    throw link_error("nothing heard for " + std::to_string(timeout_.count()) + " s while " + doing + " " +
                     names_of(ranks, name_of_));
  }

  MPI_Comm ranks_;
  std::size_t max_bytes_;
  std::chrono::seconds timeout_;
  rank_names name_of_;
  std::vector<std::vector<std::byte>> buffers_;  // of each rank, its last frame
};

class socket_way final : public way {
 public:
  explicit socket_way(std::unique_ptr<transport> sockets) : sockets_(std::move(sockets)) {}

  std::vector<sent_frame> send(std::span<const std::size_t> to, message_kind kind, const outgoing_frame& what,
                               std::span<const lamina::bounded::obligations> of_each) override {
    return sockets_->send_frame(to, kind, what, of_each);
  }
  std::vector<message> receive(std::span<const std::size_t> from, message_kind kind) override {
    std::vector<message> frames = sockets_->receive_from_each(from);
    for (const message& each : frames) {
      if (each.kind != kind)
        throw link_error(sockets_->name_of(from[each.sender]) + " sent " + describe(each.kind) +
                         " in place of " + describe(kind));
    }
    return frames;
  }

 private:
  std::unique_ptr<transport> sockets_;
};

}  // namespace

std::unique_ptr<way> way_over_mpi(MPI_Comm ranks, std::size_t max_bytes, std::chrono::seconds timeout,
                                  rank_names name_of) {
  return std::make_unique<mpi_way>(ranks, max_bytes, timeout, std::move(name_of));
}

std::unique_ptr<way> way_over_udp(MPI_Comm ranks, const lamina::bounded::chunk_grid& grid,
                                  const socket_options& how, std::size_t max_bytes,
                                  std::chrono::seconds timeout, rank_names name_of) {
  int number = 0;
  int count = 0;
  check_mpi(MPI_Comm_rank(ranks, &number), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(ranks, &count), "MPI_Comm_size");
  const auto rank = static_cast<std::size_t>(number);
  const auto clients = static_cast<std::size_t>(count) - 1;
  std::vector<std::size_t> peers(rank == 0 ? clients : 1);
  if (rank == 0) std::iota(peers.begin(), peers.end(), std::size_t{1});
  return std::make_unique<socket_way>(meet_over_udp(
      ranks,
      {.rank = rank,
       .ranks = 1 + clients,
       .takes_gradients = rank == 0,
       .peers = peers,
       .frames = {.gradients = grid,
                  .parameters = grid,
                  .most_bound_up_ppm = how.bound_up_ppm,
                  .stop = how.stop,
                  .has_tags = how.has_tags},
       .link_bits = how.link_rate_bits,
       // The clients send at the same time; the server sends to all of them over one link, which they share in turns.
       .senders = static_cast<std::uint32_t>(rank == 0 ? 1 : clients),
       .controls_rate = how.controls_rate,
       .max_message_bytes = max_bytes,
       .timeout_of = [timeout](std::size_t) { return timeout; },
       .name_of = std::move(name_of)},
      local_paths(how.interfaces, how.interfaces.empty()),
      {.inject_loss = how.inject_loss, .inject_seed = how.seed << 8U | rank}));
}

}  // namespace lab
