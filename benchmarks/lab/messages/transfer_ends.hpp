// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <lamina/bounded/bounded.hpp>
#include <span>
#include <system_error>

#include "messages/transfer.hpp"

/// The two ends of bounded transfers, as the simulated network of a single process (lossy_way) drives them. Each is a state machine of lamina/bounded and what its transfers took. A network asks an end for what it has
/// to say until it has nothing, hands it what comes, and comes back at its deadline; how it carries things, and how it waits,
/// is its own.
namespace lab {

/// Hands all that an end has to say now to `say(bytes)`.
template <class End, class Say>
void say_all(End& end, lamina::bounded::instant now, Say&& say) {
  for (auto said = end.poll_control(now); !said.empty(); said = end.poll_control(now)) say(said);
}

class sending_end {
 public:
  sending_end(const lamina::bounded::chunk_grid& grid, const lamina::bounded::sender_options& options)
      : machine_(grid, options) {}

  lamina::bounded::bounded_sender& machine() { return machine_; }
  const lamina::bounded::bounded_sender& machine() const { return machine_; }
  /// As bounded_sender::begin().
  void begin(const lamina::bounded::frame_chunks& frame, std::span<const std::byte> report,
             const lamina::bounded::obligations& beside);
  /// Of the transfer that is done, as far as this end knows it: not what came twice or late.
  sent_frame result() const;

 private:
  lamina::bounded::bounded_sender machine_;
  lamina::bounded::sender_counters before_;
};

class receiving_end {
 public:
  receiving_end(const lamina::bounded::chunk_grid& grid, const lamina::bounded::receiver_options& options)
      : machine_(grid, options) {}

  lamina::bounded::bounded_receiver& machine() { return machine_; }
  const lamina::bounded::bounded_receiver& machine() const { return machine_; }
  /// What came twice or late since it was asked for last, and what is missing of the frame that is frozen.
  transfer_cost take_cost();
  /// Of the frame that is frozen, at this cost.
  arrived_frame result(const transfer_cost& cost) const;

 private:
  lamina::bounded::bounded_receiver machine_;
  lamina::bounded::receiver_counters before_;
};

}  // namespace lab
