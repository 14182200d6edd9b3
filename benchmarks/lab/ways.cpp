// SPDX-License-Identifier: MIT
#include "ways.hpp"

#include <algorithm>
#include <exception>
#include <lamina/adapt/mpi.hpp>
#include <map>
#include <type_traits>
#include <utility>

#include "messages/interfaces.hpp"
#include "messages/mpi_session.hpp"

namespace lab {
namespace {

namespace bounded = lamina::bounded;
namespace udp = lamina::udp;

class mpi_way final : public way {
 public:
  mpi_way(MPI_Comm ranks, std::chrono::seconds timeout) : ranks_(ranks), timeout_(timeout) {}

  std::vector<std::optional<lamina::delivery>> send(std::span<const std::size_t> to,
                                                    const lamina::encoded_frame& frame,
                                                    const bounded::frame_chunks*,
                                                    std::span<const bounded::obligations>) override {
    // One after the other: who has all of it can begin to compute.
    for (const std::size_t rank : to) lamina::mpi::send(frame, static_cast<int>(rank), tag, ranks_, timeout_);
    return std::vector<std::optional<lamina::delivery>>(to.size());
  }
  std::vector<arrival> receive(std::span<const std::size_t> from) override {
    for (std::size_t come = 0; come < from.size(); ++come) {
      const int rank = lamina::mpi::wait_for_message(
          from.size() == 1 ? static_cast<int>(from[0]) : MPI_ANY_SOURCE, tag, ranks_, timeout_);
      lamina::mpi::receive(buffers_[static_cast<std::size_t>(rank)], rank, tag, ranks_, timeout_);
    }
    std::vector<arrival> frames;
    for (const std::size_t rank : from) frames.push_back({.rank = rank, .bytes = buffers_[rank]});
    return frames;
  }

 private:
  static constexpr int tag = 1;
  MPI_Comm ranks_;
  std::chrono::seconds timeout_;
  std::map<std::size_t, std::vector<std::byte>> buffers_;  // of each rank, its last frame
};

class socket_way final : public way {
 public:
  explicit socket_way(std::unique_ptr<udp::transport> sockets) : sockets_(std::move(sockets)) {}
  socket_way(const socket_way&) = delete;
  socket_way& operator=(const socket_way&) = delete;
  // Where the rank ends by an exception its connections stay open until the process ends: it has yet to say why.
  ~socket_way() override {
    if (std::uncaught_exceptions() > 0) static_cast<void>(sockets_.release());
  }

  std::vector<std::optional<lamina::delivery>> send(std::span<const std::size_t> to,
                                                    const lamina::encoded_frame&,
                                                    const bounded::frame_chunks* chunks,
                                                    std::span<const bounded::obligations> of_each) override {
    return sockets_->send_frame(to, *chunks, of_each);
  }
  std::vector<arrival> receive(std::span<const std::size_t> from) override {
    std::vector<arrival> frames;
    for (udp::arrival& each : sockets_->receive_from_each(from))
      frames.push_back({each.rank, each.bytes, std::move(each.arrived)});
    return frames;
  }
  packet_counts packets() override {
    using bounded::packet_fate;
    packet_counts all;
    for (const udp::peer_counters& each : sockets_->counters().peers) {
      all.sent += each.sent.packets;
      all.repeated += each.sent.repeated;
      all.wire_bytes += each.sent.wire_bytes;
      all.rounds = std::max<std::uint64_t>(all.rounds, each.rounds);
      all.duplicate += each.taken.of(packet_fate::duplicate);
      // Those that come when the next transfer has begun are stale to it.
      all.late += each.taken.of(packet_fate::late) + each.taken.of(packet_fate::stale);
    }
    return all;
  }

 private:
  std::unique_ptr<udp::transport> sockets_;
};

}  // namespace

std::unique_ptr<way> way_over_mpi(MPI_Comm ranks, std::chrono::seconds timeout) {
  return std::make_unique<mpi_way>(ranks, timeout);
}

std::unique_ptr<way> way_over_udp(MPI_Comm ranks, const bounded::chunk_grid& grid, const socket_options& how,
                                  std::chrono::seconds timeout, rank_names name_of) {
  int number = 0;
  int count = 0;
  check_mpi(MPI_Comm_rank(ranks, &number), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(ranks, &count), "MPI_Comm_size");
  const auto rank = static_cast<std::size_t>(number);
  const auto all = static_cast<std::size_t>(count);
  const bool is_server = rank == 0;

  udp::open_sockets here(local_paths(how.interfaces, how.interfaces.empty()),
                         {.inject_loss = how.inject_loss, .inject_seed = how.seed << 8U | rank});
  std::uint64_t secret = is_server ? udp::draw_secret() : 0;
  std::vector<udp::rank_addresses> addresses(all);
  static_assert(std::is_trivially_copyable_v<udp::rank_addresses>);
  check_mpi(MPI_Bcast(&secret, 1, MPI_UINT64_T, 0, ranks), "MPI_Bcast");
  check_mpi(MPI_Allgather(&here.addresses, sizeof here.addresses, MPI_BYTE, addresses.data(),
                          sizeof here.addresses, MPI_BYTE, ranks),
            "MPI_Allgather");

  udp::transport_options options{
      .rank = rank,
      .ranks = all,
      .secret = secret,
      .stop = how.stop,
      .has_classes = how.has_tags,
      // The clients send at the same time; the server sends to all of them over one link, which they share in turns.
      .rate = {.link_bits = how.link_rate_bits,
               .senders = static_cast<std::uint32_t>(is_server ? 1 : all - 1),
               .is_controlled = how.controls_rate},
      .meeting_timeout = 2 * timeout,
      .name_of = std::move(name_of)};
  for (std::size_t peer = is_server ? 1 : 0; peer < (is_server ? all : 1); ++peer)
    options.peers.push_back(
        {.rank = peer,
         .sends = grid,
         .takes = grid,
         .kind = is_server ? lamina::frame_kind::gradients : lamina::frame_kind::parameters,
         .most_bound_ppm = is_server ? how.bound_up_ppm : 0,
         .timeout = timeout});
  return std::make_unique<socket_way>(std::make_unique<udp::transport>(std::move(here), addresses, options));
}

}  // namespace lab
