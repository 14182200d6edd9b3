// SPDX-License-Identifier: MIT
#include "ways.hpp"

#include <lamina/adapt/mpi.hpp>
#include <map>
#include <numeric>
#include <utility>

#include "messages/mpi_session.hpp"
#include "messages/over_udp.hpp"

namespace lab {
namespace {

class mpi_way final : public way {
 public:
  mpi_way(MPI_Comm ranks, std::chrono::seconds timeout) : ranks_(ranks), timeout_(timeout) {}

  std::vector<sent_frame> send(std::span<const std::size_t> to, message_kind kind,
                               const lamina::encoded_frame& frame, const lamina::bounded::frame_chunks*,
                               std::span<const lamina::bounded::obligations>) override {
    // One after the other: who has all of it can begin to compute.
    for (const std::size_t rank : to)
      lamina::mpi::send(frame, static_cast<int>(rank), static_cast<int>(kind), ranks_, timeout_);
    return std::vector<sent_frame>(to.size());
  }
  std::vector<message> receive(std::span<const std::size_t> from, message_kind kind) override {
    const int tag = static_cast<int>(kind);
    for (std::size_t come = 0; come < from.size(); ++come) {
      const int rank = lamina::mpi::wait_for_message(
          from.size() == 1 ? static_cast<int>(from[0]) : MPI_ANY_SOURCE, tag, ranks_, timeout_);
      lamina::mpi::receive(buffers_[static_cast<std::size_t>(rank)], rank, tag, ranks_, timeout_);
    }
    std::vector<message> frames;
    for (std::size_t k = 0; k < from.size(); ++k)
      frames.push_back({.sender = k, .kind = kind, .bytes = buffers_[from[k]], .owner = {}});
    return frames;
  }

 private:
  MPI_Comm ranks_;
  std::chrono::seconds timeout_;
  std::map<std::size_t, std::vector<std::byte>> buffers_;  // of each rank, its last frame
};

class socket_way final : public way {
 public:
  explicit socket_way(std::unique_ptr<transport> sockets) : sockets_(std::move(sockets)) {}

  std::vector<sent_frame> send(std::span<const std::size_t> to, message_kind kind,
                               const lamina::encoded_frame& frame,
                               const lamina::bounded::frame_chunks* chunks,
                               std::span<const lamina::bounded::obligations> of_each) override {
    return sockets_->send_frame(to, kind, {.frame = {frame.segments(), nullptr}, .chunks = chunks}, of_each);
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

std::unique_ptr<way> way_over_mpi(MPI_Comm ranks, std::chrono::seconds timeout) {
  return std::make_unique<mpi_way>(ranks, timeout);
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
