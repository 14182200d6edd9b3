// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <lamina/udp/udp.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "channel.hpp"
#include "setting.hpp"

namespace soak {

namespace udp = lamina::udp;

/// What all ranks open before they are processes: the server, which is rank 0, and the workers.
struct opened_ranks {
  std::vector<udp::open_sockets> sockets;
  std::vector<udp::rank_addresses> addresses;
  std::uint64_t secret = 0;
};
inline opened_ranks open_ranks(const setting& run) {
  opened_ranks all;
  all.secret = udp::draw_secret();
  for (std::size_t rank = 0; rank <= run.workers; ++rank) {
    all.sockets.emplace_back(
        udp::parse_addresses("127.0.0.1:0"),
        udp::socket_options{.inject_loss = run.inject_loss, .inject_seed = run.seed << 8U | rank});
    all.addresses.push_back(all.sockets.back().addresses);
  }
  return all;
}

/// The gradients' way: packets over UDP on loopback, some of which are lost. One end of it. Throws udp::peers_lost where a peer is gone.
class uplink {
 public:
  uplink(const setting& run, const lamina::layout& parts, std::size_t rank, opened_ranks opened)
      : run_(run), grid_(grid_of(run, parts)), losses_(grid_) {
    udp::open_sockets here = std::move(opened.sockets[rank]);
    opened.sockets.clear();  // those of the others are theirs
    udp::transport_options options{
        .rank = rank,
        .ranks = run.workers + 1,
        .secret = opened.secret,
        .mtu = mtu,
        .rate = {.link_bits = 10'000'000'000,
                 .senders = rank == server ? 1 : static_cast<std::uint32_t>(run.workers)},
        .meeting_timeout = 2 * timeout,
        .name_of = name_of};
    for (std::size_t other = 0; other <= run.workers; ++other) {
      if ((rank == server) == (other == server)) continue;
      options.peers.push_back({.rank = other,
                               .sends = grid_,
                               .takes = grid_,
                               .most_bound_ppm = rank == server ? run.bound_ppm : 0,
                               .timeout = timeout});
    }
    transport_.emplace(std::move(here), opened.addresses, options);
  }

  /// A worker's: what of the frame has arrived.
  lamina::delivery send(const lamina::encoded_frame& frame, const lamina::selection& chosen) {
    const lamina::bounded::frame_chunks chunks(frame, chosen, grid_, {.bound_ppm = run_.bound_ppm});
    const lamina::bounded::obligations owed{.required = losses_.required(chosen, most_losses)};
    auto sent = transport_->send_frame({&server, 1}, chunks, {&owed, 1});
    losses_.note(sent[0].value());
    return std::move(sent[0]).value();
  }

  /// The server's: the worker's next frame, with zeros where nothing arrived. It stands until the one after it is asked for. Throws
  /// std::runtime_error where more is missing than may be.
  udp::arrival receive(std::size_t worker) {
    udp::arrival got = transport_->receive(worker + 1);
    const lamina::delivery& arrived = got.arrived;
    for (std::size_t part = 0; part < grid_.fragments().layers(); ++part) {
      const std::size_t chunks = arrived.chunks(part);
      if (arrived.lost_chunks(part) * 1'000'000 > chunks * run_.bound_ppm)
        throw std::runtime_error("worker " + std::to_string(worker) + ": " +
                                 std::to_string(arrived.lost_chunks(part)) + " of " + std::to_string(chunks) +
                                 " chunks of a part are missing");
    }
    return got;
  }

 private:
  static constexpr std::size_t server = 0;
  static constexpr std::size_t mtu = 1500;
  static constexpr std::chrono::seconds timeout = deadline;
  static constexpr unsigned most_losses =
      1;  // a velocity that waits for long needs more digits than a float has

  static std::string name_of(std::size_t rank) {
    return rank == server ? "the server" : "worker " + std::to_string(rank - 1);
  }
  static lamina::bounded::chunk_grid grid_of(const setting& run, const lamina::layout& parts) {
    const std::size_t bytes = mtu - 28 - lamina::bounded::packet_header_bytes;
    const auto type = run.options.payload;
    return lamina::bounded::chunk_grid::of<float>(parts, type,
                                                  lamina::bounded::chunk_elements<float>(type, bytes));
  }

  setting run_;
  lamina::bounded::chunk_grid grid_;
  lamina::bounded::loss_memory losses_;
  std::optional<udp::transport> transport_;
};

}  // namespace soak
