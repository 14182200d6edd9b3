// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <lamina/bounded/bounded.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "messages/udp/meeting.hpp"
#include "messages/udp/opened.hpp"
#include "messages/udp/udp_transport.hpp"
#include "setting.hpp"

namespace soak {

/// What all ranks open before they are processes: the server, which is rank 0, and the workers.
struct opened_ranks {
  std::vector<resnet50_ps::open_sockets> sockets;
  std::vector<resnet50_ps::rank_addresses> addresses;
  std::uint64_t secret = 0;
};
inline opened_ranks open_ranks(const setting& run) {
  opened_ranks all;
  all.secret = resnet50_ps::make_secret();
  for (std::size_t rank = 0; rank <= run.workers; ++rank) {
    all.sockets.push_back(
        resnet50_ps::open_paths({resnet50_ps::parse_network("127.0.0.1").begin},
                                {.inject_loss = run.inject_loss, .inject_seed = run.seed << 8U | rank}));
    all.addresses.push_back(resnet50_ps::addresses_of(all.sockets.back()));
  }
  return all;
}

/// The gradients' way: packets over UDP on loopback, some of which are lost, by the sockets of the training harness. One end of it. Throws
/// resnet50_ps::link_error where a peer is gone.
class uplink {
 public:
  uplink(const setting& run, const lamina::layout& parts, std::size_t rank, opened_ranks opened)
      : run_(run), grid_(grid_of(run, parts)), losses_(grid_) {
    resnet50_ps::open_sockets here = std::move(opened.sockets[rank]);
    opened.sockets.clear();  // those of the others are theirs
    std::vector<std::size_t> peers;
    for (std::size_t other = rank == server ? 1 : server; other <= (rank == server ? run.workers : server);
         ++other)
      peers.push_back(other);
    std::vector<resnet50_ps::endpoint> listeners;
    for (const auto& each : opened.addresses) listeners.push_back(each.control);
    auto connections =
        resnet50_ps::meet(here.control, peers, listeners,
                          {.rank = rank,
                           .hello = {.rank = static_cast<std::uint32_t>(rank),
                                     .ranks = static_cast<std::uint32_t>(run.workers + 1),
                                     .element_type = 1,
                                     .fingerprint = parts.fingerprint(),
                                     .chunk_elements = static_cast<std::uint32_t>(grid_.chunk_elements()),
                                     .mtu = static_cast<std::uint32_t>(mtu)},
                           .secret = opened.secret,
                           .name_of = name_of,
                           .timeout = timeout});
    std::vector<resnet50_ps::met_rank> met;
    for (std::size_t i = 0; i < peers.size(); ++i) {
      const auto& theirs = opened.addresses[peers[i]];
      met.push_back({std::move(connections[i]), {theirs.data.begin(), theirs.data.begin() + theirs.paths}});
    }
    transport_ = std::make_unique<resnet50_ps::udp_transport>(
        resnet50_ps::udp_transport_options{
            .rank = rank,
            .ranks = run.workers + 1,
            .takes_gradients = rank == server,
            .peers = peers,
            .frames = {.gradients = grid_, .parameters = grid_, .most_bound_up_ppm = run.bound_ppm},
            .secret = opened.secret,
            .link_bits = 10'000'000'000,
            .senders = rank == server ? 1 : static_cast<std::uint32_t>(run.workers),
            .mtu = mtu,
            .max_message_bytes = std::size_t{1} << 20U,
            .timeout_of = [](std::size_t) { return timeout; },
            .name_of = name_of},
        std::move(here.paths), std::move(met));
  }

  /// A worker's: what of the frame has arrived.
  lamina::delivery send(const lamina::encoded_frame& frame, const lamina::selection& chosen) {
    const lamina::bounded::frame_chunks chunks(frame, chosen, grid_, {.bound_ppm = run_.bound_ppm});
    const auto required = losses_.required(chosen, most_losses);
    const lamina::bounded::obligations beside{.required = required};
    auto sent =
        transport_->send_frame({&server, 1}, resnet50_ps::message_kind::gradients,
                               {.frame = {frame.segments(), nullptr}, .chunks = &chunks}, {&beside, 1});
    losses_.note(sent[0].arrived.value());
    return std::move(sent[0].arrived).value();
  }

  /// The server's: the worker's next frame, with zeros where nothing arrived. It stands until the one after it is asked for.
  resnet50_ps::message receive(std::size_t worker) {
    const std::size_t rank = worker + 1;
    return transport_->receive_from_each({&rank, 1})[0];
  }

 private:
  static constexpr std::size_t server = 0;
  static constexpr std::size_t mtu = 1500;
  static constexpr std::chrono::seconds timeout{60};
  static constexpr unsigned most_losses = 1;  // so that the sums of a momentum stay exact

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
  std::unique_ptr<resnet50_ps::udp_transport> transport_;
};

}  // namespace soak
