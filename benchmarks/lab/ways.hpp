// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/bounded/bounded.hpp>
#include <lamina/frame.hpp>
#include <lamina/server.hpp>
#include <lamina/udp/udp.hpp>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lab {

/// How a parameter server and its clients are linked, and what of gradients may be lost there.
struct link_options {
  std::string transport = "mpi";  ///< or udp: frames as packets, some of which may be lost
  std::string interfaces = "lo";  ///< of UDP: a path each, with commas between them
  std::uint64_t rate_bits = 0;    ///< a second; 0: not known
  double loss_bound = 0;          ///< p of gradients, at most a half
  double inject_loss = 0;         ///< share of the packets
  std::uint64_t inject_seed = 1;  ///< of which ones
  bool has_tags = true;           ///< the smallest of each layer go last and are dropped first
  bool controls_rate = true;      ///< else it is always the link's
  bool stops_on_probe = false;    ///< a transfer ends on probe; else eagerly

  /// Why these cannot be meant together; empty: they can.
  std::string mistake() const;
  bool is_lossy() const { return transport == "udp"; }
  std::uint32_t bound_ppm() const { return static_cast<std::uint32_t>(loss_bound * 1e6 + 0.5); }
  /// Of a frame of which fragments may be missing none would hold; packets have one.
  lamina::frame_checksum checksum() const {
    return is_lossy() ? lamina::frame_checksum::none : lamina::frame_checksum::xxh3;
  }
};

/// The options that all programs with a server have, in a group of the help.
void add_link_options(CLI::App& app, const char* group, link_options& into);

/// Gives "the server", "worker 3" for a rank.
using rank_names = std::function<std::string(std::size_t rank)>;

/// Packets of one rank since the start; none over MPI, where they are the kernel's.
struct packet_counts {
  std::uint64_t sent = 0;
  std::uint64_t repeated = 0;           ///< of these: sent before in the same transfer
  std::uint64_t late = 0;               ///< arrived when the transfer had ended
  std::uint64_t missing = 0;            ///< chunks of gradients, when their transfers had ended
  std::uint64_t missing_droppable = 0;  ///< of these
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

  /// The same frame to each client; returns when each has all of it. `sent` are the layers in it.
  virtual void send_parameters(std::span<const std::size_t> to, const lamina::encoded_frame& frame,
                               const lamina::selection& sent) = 0;
  /// To the server; returns when it has as much of it as it must, and says how much that is: all of it where it says nothing. What was lost
  /// three times in a row must arrive.
  virtual std::optional<lamina::delivery> send_gradients(const lamina::encoded_frame& frame,
                                                         const lamina::selection& sent) = 0;
  /// A frame of each of these ranks, in their order. The bytes stand until the next frame of the same rank is asked for.
  virtual std::vector<arrival> receive(std::span<const std::size_t> from) = 0;
  virtual packet_counts packets() { return {}; }
};

/// All ranks call it, and meet by MPI.
///
/// \param fragments  of which the frames in both directions are
std::unique_ptr<way> open_way(MPI_Comm ranks, const lamina::layout& fragments, const link_options& how,
                              std::chrono::seconds timeout, const rank_names& name_of);

/// The same reply to all clients, who have all seen the same.
template <class Parameters>
lamina::server_reply reply_to_all(lamina::server<float>& server, const Parameters& parameters) {
  for (std::size_t w = 1; w < server.senders(); ++w) static_cast<void>(server.reply(w, parameters));
  return server.reply(0, parameters);
}
inline void commit_all(lamina::server<float>& server, const lamina::server_reply& reply) {
  for (std::size_t w = 0; w < server.senders(); ++w) server.commit(w, reply.clock());
}

/// Hands the frames of all clients to the server; the share of their elements that is missing. Throws std::runtime_error, naming the rank, for
/// a bad one.
inline double add_gradients(lamina::server<float>& server, std::span<const arrival> frames,
                            const rank_names& name_of) {
  std::uint64_t sent = 0;
  std::uint64_t lost = 0;
  for (const arrival& each : frames) {
    if (each.arrived) {
      sent += each.arrived->sent().sent_elements();
      lost += each.arrived->lost_elements();
    }
    if (const std::error_code bad = server.add_view(each.bytes))
      throw std::runtime_error(name_of(each.rank) + " sent a bad frame: " + bad.message());
  }
  return sent == 0 ? 0 : static_cast<double>(lost) / static_cast<double>(sent);
}

}  // namespace lab
