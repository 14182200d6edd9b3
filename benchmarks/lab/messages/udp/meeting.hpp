// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <lamina/bounded/messages.hpp>
#include <span>
#include <vector>

#include "messages/transport.hpp"
#include "messages/udp/address.hpp"
#include "messages/udp/descriptor.hpp"

/// The connections of control between ranks that know each other's addresses and the secret of their run.
namespace lab {

/// Listens on an address of this rank, at a port of the system's choice, for the ranks above it. Throws link_error.
class listener {
 public:
  explicit listener(const endpoint& local);
  const endpoint& local() const { return local_; }
  int descriptor_number() const { return socket_.get(); }

 private:
  descriptor socket_;
  endpoint local_;
};

struct meeting_options {
  std::size_t rank = 0;
  lamina::bounded::hello_body hello;  ///< this rank's
  std::uint64_t secret = 0;
  rank_names name_of;
  std::chrono::milliseconds timeout{10'000};  ///< in which all must have met
  /// What a connection that came may take until its HELLO is there.
  std::chrono::milliseconds hello_timeout{5'000};
};

/// Connects this rank with each of `peers`: it calls those below it, at `listeners[rank]`, and those above it call. Both say HELLO. A caller
/// that does not prove the secret is not listened to, and costs nothing but a place among the 2 × ranks that may wait; one that
/// proves it and was started otherwise ends the run. The connections in the order of `peers`, which do not block.
///
/// \throws link_error  naming the rank: who cannot be reached, or was started for another run
/// \throws peers_lost  naming those that did not come in time
std::vector<descriptor> meet(const listener& here, std::span<const std::size_t> peers,
                             std::span<const endpoint> listeners, const meeting_options& options);

}  // namespace lab
