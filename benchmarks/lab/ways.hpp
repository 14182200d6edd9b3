// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/bounded/bounded.hpp>
#include <lamina/frame.hpp>
#include <lamina/udp/udp.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace lab {

/// Gives "the server", "worker 3" for a rank.
using rank_names = std::function<std::string(std::size_t rank)>;

/// Packets of one rank since the start; none over MPI, where they are the kernel's.
struct packet_counts {
  std::uint64_t sent = 0;
  std::uint64_t repeated = 0;    ///< of these: sent before in the same transfer
  std::uint64_t duplicate = 0;   ///< arrived, and had arrived before
  std::uint64_t late = 0;        ///< arrived when the transfer had ended
  std::uint64_t wire_bytes = 0;  ///< of all that were sent, with all headers
  std::uint64_t rounds = 0;      ///< of the last transfers from here, the one that had the most
};

/// A frame of one rank.
struct arrival {
  std::size_t rank = 0;
  std::span<const std::byte> bytes;              ///< zeros where elements are missing
  std::optional<lamina::delivery> arrived = {};  ///< over MPI none: all of it
};

/// How frames go between a parameter server, rank 0, and its clients: over MPI, or as packets of which some may be lost. Between two ranks
/// frames arrive in the order in which they were sent. Errors are runtime errors that name the rank.
class way {
 public:
  way() = default;
  way(const way&) = delete;
  way& operator=(const way&) = delete;
  virtual ~way() = default;

  /// The same frame to each; returns when each has as much of it as it must, and says how much that is: all of it where it says nothing.
  ///
  /// \param chunks   how it is cut where some of it may be lost; nullptr: nothing may be
  /// \param of_each  what each receiver must get whatever the bound says: none, or one for each receiver
  virtual std::vector<std::optional<lamina::delivery>> send(
      std::span<const std::size_t> to, const lamina::encoded_frame& frame,
      const lamina::bounded::frame_chunks* chunks,
      std::span<const lamina::bounded::obligations> of_each = {}) = 0;
  /// A frame of each of these ranks, in their order. The bytes stand until the next frame of the same rank is asked for.
  virtual std::vector<arrival> receive(std::span<const std::size_t> from) = 0;
  virtual packet_counts packets() { return {}; }
};

/// Over MPI, where nothing is lost. Its errors are also lamina::mpi::timeout_error.
std::unique_ptr<way> way_over_mpi(MPI_Comm ranks, std::chrono::seconds timeout);

/// Sockets of packets, and what of gradients may be lost on them.
struct socket_options {
  std::string interfaces;            ///< networks, a path each, with commas between them; empty: loopback
  std::uint64_t link_rate_bits = 0;  ///< a second; 0: not known
  std::uint32_t bound_up_ppm = 0;    ///< p of gradients, in parts per million
  bool has_tags = true;              ///< packets have their class and precedence
  bool controls_rate = true;
  lamina::bounded::stop_policy stop = lamina::bounded::stop_policy::eager;
  double inject_loss = 0;  ///< share of the packets
  std::uint64_t seed = 1;  ///< of which ones

  /// What a packet has room for: Ethernet's 1500 bytes without the headers of IP, UDP and the packet.
  std::size_t packet_data_bytes() const {
    const std::size_t headers = interfaces.find(':') == std::string::npos ? 28 : 48;
    return 1500 - headers - lamina::bounded::packet_header_bytes;
  }
};

/// Over sockets. All ranks meet by MPI; frames in both directions are cut by `grid`.
std::unique_ptr<way> way_over_udp(MPI_Comm ranks, const lamina::bounded::chunk_grid& grid,
                                  const socket_options& how, std::chrono::seconds timeout,
                                  rank_names name_of);

}  // namespace lab
